"""Faults of the comparison: the port is right, but the run was made or read in another way than the base's.

Each says how the observation looks when it is assumed; the healthy port must then explain it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from porting_kit.diagnosis.port_state import PortState

PADDING_IDS = (0, 1)
"""Ids that pad a batch, beside the end ids."""


def double_start_token(state: PortState, observation: Any) -> Any:
    """Every prompt had its first token twice."""
    return replace(observation, prompts=[[prompt[0], *prompt] for prompt in observation.prompts])


def lose_start_token(state: PortState, observation: Any) -> Any:
    """Every prompt had lost its first token."""
    if min(map(len, observation.prompts)) < 2:
        raise ValueError("a prompt has one token")
    return replace(observation, prompts=[list(prompt[1:]) for prompt in observation.prompts])


def read_padding(*, on_left: bool, place: int) -> Callable[[PortState, Any], Any]:
    """Every prompt was padded to the longest, and the padding read as text.

    Args:
        on_left: padding stands before the prompt.
        place: of the id among those that padding is made of.
    """

    def reread(state: PortState, observation: Any) -> Any:
        ids = list(dict.fromkeys((*observation.end_ids, *PADDING_IDS)))
        if place >= len(ids):
            return observation
        longest = max(map(len, observation.prompts))
        fill = [ids[place]]
        padded = [
            [*fill * (longest - len(prompt)), *prompt] if on_left else [*prompt, *fill * (longest - len(prompt))]
            for prompt in observation.prompts
        ]
        return replace(observation, prompts=padded)

    return reread


def keep_previous_text(state: PortState, observation: Any) -> Any:
    """From the second prompt on, the text of the request before it was still in the cache."""
    texts: list[list[int]] = []
    for index, prompt in enumerate(observation.prompts):
        before = [] if index == 0 else [*texts[-1], *observation.tokens[index - 1]]
        texts.append([*before, *prompt])
    return replace(observation, prompts=texts)


def expect_other_end(state: PortState, observation: Any) -> Any:
    """The run ended its texts by another end id than the base's, so their lengths say nothing."""
    return replace(observation, asked_tokens=None, overrun=None)


def allow_padding(state: PortState, observation: Any) -> Any:
    """Ids in the padding of the vocabulary are taken as they are; nothing after one can be judged."""
    return replace(observation, allows_padding=True)
