"""Faults of how tokens were chosen: the logits are the port's own, but the largest did not always win.

Each says which logits chose when it is assumed. A penalty's size is not guessed from a list: every choice bounds it
from below (a repeated token lost) or from above (a repeated token won all the same), and a value between is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.diagnosis.port_state import PortState

Rescore = Callable[[PortState, torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]

LARGEST_FACTOR, LARGEST_AMOUNT = 5.0, 10.0
"""Penalties beyond these are no setting that anybody uses."""

NGRAM_SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Estimate:
    """A setting whose value was read off the choices.

    Args:
        rescore: the logits that chose under it.
        words: what it is, with its bounds.
    """

    rescore: Rescore
    words: str


def penalise_repetition(penalty: float) -> Rescore:
    """Logits of tokens that the text holds already are divided by the penalty, or multiplied where negative.

    Source: transformers' RepetitionPenaltyLogitsProcessor, and penaltyKernels.cu of TensorRT-LLM.
    """

    def rescore(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        seen = _count_before(prompt, tokens, logits.shape[-1]) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return rescore


def subtract_penalty(amount: float, *, by_count: bool, with_prompt: bool) -> Rescore:
    """Logits of tokens that were emitted already less an amount: once (presence), or each time (frequency).

    Source: penaltyKernels.cu of TensorRT-LLM, 0.11.0.dev2024062500.
    """

    def rescore(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        counts = _count_before(prompt if with_prompt else (), tokens, logits.shape[-1])
        return logits - amount * (counts if by_count else counts.clamp(max=1))

    return rescore


def forbid_ngrams(size: int) -> Rescore:
    """A token that would complete an n-gram of the text so far cannot be chosen (no_repeat_ngram_size)."""

    def rescore(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        changed = logits.clone()
        for place in range(len(logits)):
            text = [*prompt, *tokens[:place]]
            tail = text[len(text) - size + 1 :]
            ends = range(size - 1, len(text))
            banned = {text[end] for end in ends if text[end - size + 1 : end] == tail}
            known = [token for token in banned if 0 <= token < logits.shape[-1]]
            changed[place, known] = -torch.inf
        return changed

    return rescore


def allow_any(state: PortState, logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Any token may have been drawn: the emitted one is moved to the top. Ids outside the vocabulary are not."""
    chosen = torch.as_tensor(list(tokens))
    rows = ((chosen >= 0) & (chosen < logits.shape[-1])).nonzero()[:, 0]
    changed = logits.clone()
    changed[rows, chosen[rows]] = logits[rows].amax(-1) + 1.0
    return changed


def estimate_repetition(rows: Sequence[torch.Tensor], observation: Any) -> Estimate | None:
    """The repetition penalty that the choices ask for; None when they ask for none."""
    lower, upper = 1.0, LARGEST_FACTOR
    for logits, counts, token in _places(rows, observation, with_prompt=True):
        own, seen = logits[token], counts > 0
        same_sign = (logits > 0) == (own > 0)
        ratio = torch.where(own > 0, logits / own, own / logits)
        if not seen[token]:
            needed = torch.where(same_sign, ratio, torch.inf)[seen & (logits > own)]
            lower = _raise(lower, needed, LARGEST_FACTOR)
        else:
            allowed = torch.where(same_sign, 1 / ratio, torch.inf)[~seen & (logits < own)]
            upper = min(upper, float(allowed.min())) if len(allowed) else upper
    if lower <= 1.0:
        return None
    value = choose_round(lower, upper)
    return Estimate(penalise_repetition(value), f"a repetition penalty of {_between(lower, upper, LARGEST_FACTOR)}")


def estimate_amount(by_count: bool, with_prompt: bool) -> Callable[[Sequence[torch.Tensor], Any], Estimate | None]:
    """The presence or frequency penalty that the choices ask for."""

    def estimate(rows: Sequence[torch.Tensor], observation: Any) -> Estimate | None:
        lower, upper = 0.0, LARGEST_AMOUNT
        for logits, counts, token in _places(rows, observation, with_prompt=with_prompt):
            weight = counts if by_count else counts.clamp(max=1)
            gap, more = logits - logits[token], weight - weight[token]
            lower = _raise(lower, (gap / more)[(gap > 0) & (more > 0)], LARGEST_AMOUNT)
            allowed = (gap / more)[(gap < 0) & (more < 0)]
            upper = min(upper, float(allowed.min())) if len(allowed) else upper
        if lower <= 0.0:
            return None
        value = choose_round(lower, upper)
        kind, text = "frequency" if by_count else "presence", "prompt and output" if with_prompt else "the output"
        return Estimate(
            subtract_penalty(value, by_count=by_count, with_prompt=with_prompt),
            f"a {kind} penalty of {_between(lower, upper, LARGEST_AMOUNT)} over {text}",
        )

    return estimate


def choose_round(lower: float, upper: float) -> float:
    """A value with few digits between two bounds; a little above the lower one when they cross."""
    if not lower < upper:
        return lower * (1 + 1e-4)
    for digits in range(1, 6):
        value = round((lower + upper) / 2, digits)
        if lower < value < upper:
            return value
    return (lower + upper) / 2


def _between(lower: float, upper: float, largest: float) -> str:
    return f"{lower:.3f} to {upper:.3f}" if lower < upper < largest else f"at least {lower:.3f}"


def _raise(lower: float, needed: torch.Tensor, largest: float) -> float:
    """The bound with what one choice needs, unless no penalty could explain that choice."""
    most = float(needed.max()) if len(needed) else 0.0
    return max(lower, most) if most <= largest else lower


def _places(
    rows: Sequence[torch.Tensor], observation: Any, *, with_prompt: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Logits [V], how often each token came before, and the emitted token, for every place."""
    for logits, prompt, tokens in zip(rows, observation.prompts, observation.tokens, strict=True):
        V = logits.shape[-1]
        counts = _count_before(prompt if with_prompt else (), tokens, V)
        for place, token in enumerate(tokens):
            if 0 <= token < V:
                yield logits[place].double().cpu(), counts[place], token


def _count_before(prompt: Sequence[int], tokens: Sequence[int], V: int) -> torch.Tensor:
    """float64 [n, V]: how often each token stands in the prompt and the output before each place."""
    first = torch.tensor([token for token in prompt if 0 <= token < V], dtype=torch.long)
    counts = torch.zeros(len(tokens), V, dtype=torch.float64)
    if len(tokens):
        counts[0] = torch.bincount(first, minlength=V)
    for place, token in enumerate(list(tokens)[:-1], start=1):
        counts[place] = counts[place - 1]
        if 0 <= token < V:
            counts[place, token] += 1
    return counts
