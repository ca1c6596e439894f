"""Faults of the comparison: the port is right, but the run was made or read in another way than the base's.

Each says how the observation looks when it is assumed; the healthy port must then explain it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from porting_kit.diagnosis.port_state import PortState

PENALTIES = (1.1, 1.05, 1.2, 1.3)
"""Repetition penalties that generation configs ask for."""

SAMPLED_FROM = 50
"""transformers' own top-k: sampled tokens are among so many best."""


def double_start_token(state: PortState, observation: Any) -> Any:
    """Every prompt had its first token twice."""
    return replace(observation, prompts=[[prompt[0], *prompt] for prompt in observation.prompts])


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


def penalise_repetition(penalty: float) -> Callable[[PortState, torch.Tensor, Sequence[int], Sequence[int]], Any]:
    """Logits of tokens that the text holds already are divided by the penalty, or multiplied where negative.

    Source: transformers' RepetitionPenaltyLogitsProcessor, and penaltyKernels.cu of TensorRT-LLM.
    """

    def rescore(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        changed = logits.clone()
        for place in range(len(logits)):
            seen = torch.tensor(sorted({*prompt, *tokens[:place]}))
            seen = seen[seen < logits.shape[-1]]
            own = logits[place, seen]
            changed[place, seen] = torch.where(own > 0, own / penalty, own * penalty)
        return changed

    return rescore


def allow_sampling(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
    """Any of the fifty best tokens may have been drawn: it is moved to the top, unless it is not among them."""
    chosen = torch.as_tensor(list(tokens))
    best = logits.topk(min(SAMPLED_FROM, logits.shape[-1] // 2), dim=-1).indices
    drawn = (best == chosen[:, None]).any(-1)
    changed = logits.clone()
    rows = drawn.nonzero()[:, 0]
    changed[rows, chosen[rows]] = logits[rows].amax(-1) + 1.0
    return changed
