"""What was seen of a port: prompts, emitted tokens, and as much more as there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.result import AlignmentResult

PADDED_TO = 64
"""Vocabularies are padded to a multiple of the ranks, or of 64."""


@dataclass(frozen=True)
class Observation:
    """What a run of the port produced.

    Args:
        prompts: token ids.
        tokens: emitted ids per prompt, at least one each.
        tolerance: near-tie tolerance in logits, from `alignment.noise`.
        accepted_lengths: accepted tokens per generation step and prompt; None when not known.
        logits: [n, V] per prompt, the logits behind each emitted token; None when not known.
        logits_noise: relative logit error that is noise.
        asked_tokens: how many tokens were asked for; None when not known.
        end_ids: every id that ends a text.
        overrun: per prompt, whether the run went on behind an end id; None when not known.
        allows_padding: ids in the padding of the vocabulary count as explained.
    """

    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    tolerance: float
    accepted_lengths: Sequence[Sequence[int]] | None = None
    logits: Sequence[torch.Tensor] | None = None
    logits_noise: float | None = None
    asked_tokens: int | None = None
    end_ids: tuple[int, ...] = ()
    overrun: Sequence[bool] | None = None
    allows_padding: bool = False

    def select(self, chosen: Sequence[int]) -> Observation:
        """The same for some of the prompts."""

        def pick(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[index] for index in chosen]

        return replace(
            self,
            prompts=pick(self.prompts),
            tokens=pick(self.tokens),
            accepted_lengths=pick(self.accepted_lengths),
            logits=pick(self.logits),
            overrun=pick(self.overrun),
        )

    def cut(self, length: int) -> Observation:
        """The first `length` tokens of each prompt; nothing is said of how the texts end."""
        return replace(
            self,
            tokens=[row[:length] for row in self.tokens],
            logits=None if self.logits is None else [rows[:length] for rows in self.logits],
            accepted_lengths=None,
            asked_tokens=None,
            overrun=None,
        )

    def has_wrong_length(self, index: int) -> bool:
        """The text stops before it should, or goes on behind its end."""
        row = self.tokens[index]
        is_short = self.asked_tokens is not None and len(row) < self.asked_tokens
        stopped_early = is_short and bool(self.end_ids) and row[-1] not in self.end_ids
        return stopped_early or bool(self.overrun is not None and self.overrun[index])


def observe(result: AlignmentResult) -> Observation:
    """What an alignment saw, with its own measured noise.

    Texts that all stop at one length were asked for no more; one that is shorter than another stopped for a reason.
    """
    return Observation(
        prompts=result.prompts,
        tokens=[text.tokens for text in result.texts],
        tolerance=result.noise.near_tie_tolerance,
        accepted_lengths=result.accepted_lengths,
        logits=result.logits,
        logits_noise=ERROR_FACTOR * result.noise.relative_error,
        asked_tokens=max(len(text.tokens) for text in result.texts),
        end_ids=result.settings.end_ids,
        overrun=[text.discarded > 0 for text in result.texts],
    )
