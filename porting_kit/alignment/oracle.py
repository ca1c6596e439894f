"""Judging emitted tokens one by one: the port's own text goes through the base in one pass.

At each position the base has the history that the port had, so a wrong token is counted once and does not drag the
rest of the text along.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.alignment.reference import LogitsSource
from porting_kit.medusa.generation import TokenOrigins


class Status(enum.IntEnum):
    """How the base sees an emitted token."""

    TOP = 0
    NEAR_TIE = 1
    WRONG = 2


@dataclass(frozen=True)
class JudgedText:
    """One request's emitted tokens under the base; every tensor has one entry per token.

    Args:
        tokens: the emitted ids, up to and with the first end id.
        margins: float64, the base's logit of the emitted token minus its best other logit; negative where the base
            prefers another.
        status: int64, `Status` values.
        preferred: int64, the base's own best token.
        origins: where each token came from; None when not known (captured output).
        ended_by: the end id at the end, None when the text ran to its limit.
        discarded: tokens after the first end id, which do not count.
        stopped_early: the text is shorter than was asked for and does not end with an end id.
    """

    tokens: tuple[int, ...]
    margins: torch.Tensor
    status: torch.Tensor
    preferred: torch.Tensor
    origins: TokenOrigins | None = None
    ended_by: int | None = None
    discarded: int = 0
    stopped_early: bool = False

    def positions(self, status: Status) -> list[int]:
        """Positions with this status."""
        return (self.status == status).nonzero()[:, 0].tolist()

    @property
    def first_divergence(self) -> int | None:
        """The first wrong token's position, else the first near-tie's, None when every token is the base's best."""
        wrong, ties = self.positions(Status.WRONG), self.positions(Status.NEAR_TIE)
        return wrong[0] if wrong else (ties[0] if ties else None)

    def describe_position(self, position: int) -> dict[str, Any]:
        """One token in words and numbers, JSON-ready."""
        origins = self.origins
        return {
            "position": position,
            "emitted": self.tokens[position],
            "preferred": int(self.preferred[position]),
            "margin": float(self.margins[position]),
            "kind": Status(int(self.status[position])).name.lower(),
            "phase": None if origins is None else origins.phase(position),
            "proposed_by": None if origins is None else origins.proposer(position),
        }


def judge_texts(
    oracle: LogitsSource,
    prompts: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
    tolerance: float,
    *,
    end_ids: Sequence[int] = (),
    asked_tokens: int | None = None,
    origins: Sequence[TokenOrigins] | None = None,
) -> list[JudgedText]:
    """Judge every token of every request.

    Args:
        oracle: the base, or a fitted base that stands for it.
        prompts: token ids.
        emitted: emitted ids per request, the prompt not included.
        tolerance: gaps up to this many logits are near-ties; measured, see `noise`.
        end_ids: ids that end a text.
        asked_tokens: how many tokens were asked for; None when unknown.
        origins: parallel to `emitted`.
    """
    cut = [_cut_at_end(row, end_ids) for row in emitted]
    # An id outside the vocabulary cannot be fed back; token 0 stands in for it in the history.
    histories = [[token if 0 <= token < oracle.vocab_size else 0 for token in row[:-1]] for row in cut]
    texts = [[*_plain(prompt), *history] for prompt, history in zip(prompts, histories, strict=True)]
    all_logits = oracle.logits(texts)
    judged = []
    for index, (prompt, row, logits) in enumerate(zip(prompts, cut, all_logits, strict=True)):
        margins, preferred = token_margins(logits[len(prompt) - 1 :][: len(row)], torch.tensor(row, dtype=torch.long))
        status = torch.where(preferred == torch.tensor(row, dtype=torch.long), Status.TOP, Status.NEAR_TIE)
        status[~(margins >= -tolerance)] = Status.WRONG  # also where a margin is not a number
        ended_by = row[-1] if row and row[-1] in end_ids else None
        judged.append(
            JudgedText(
                tokens=tuple(row),
                margins=margins,
                status=status,
                preferred=preferred,
                origins=None if origins is None else origins[index],
                ended_by=ended_by,
                discarded=len(emitted[index]) - len(row),
                stopped_early=ended_by is None and asked_tokens is not None and len(row) < asked_tokens,
            )
        )
    return judged


def token_margins(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit of each token minus the best other logit, float64 [n], and the best token, int64 [n], from [n, V].

    Of equal logits the lowest id is the best token, as in greedy decoding. An id outside the vocabulary (a padding
    column that won) has the margin -inf.
    """
    logits = logits.double().cpu()
    exists = (tokens >= 0) & (tokens < logits.shape[-1])
    own = logits.gather(-1, tokens.where(exists, 0)[:, None])[:, 0]
    best = logits.topk(2, dim=-1)
    best_other = torch.where(best.indices[:, 0] == tokens, best.values[:, 1], best.values[:, 0])
    return torch.where(exists, own - best_other, -torch.inf), logits.argmax(-1)


def _cut_at_end(row: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    row = _plain(row)
    ends = [position for position, token in enumerate(row) if token in end_ids]
    return row[: ends[0] + 1] if ends else row


def _plain(row: Sequence[int]) -> list[int]:
    return row.tolist() if isinstance(row, torch.Tensor) else [int(token) for token in row]
