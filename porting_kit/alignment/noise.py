"""How far logits may differ for numerical reasons alone, measured on the model and texts at hand.

The base is run twice over the same tokens: as the oracle (float32) and rounding as the port's dtype does (in float64
when the port is float32). Both runs are Hugging Face's, so a fault of the port cannot widen its own tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.alignment.reference import LogitsSource, Reference, dtype_name
from porting_kit.alignment.rounding import read_rounded
from porting_kit.errors import BaseModelError

CANDIDATES = 8
"""Near-ties happen among the best tokens: the gap to the best is measured for this many of them."""

SAFETY = 2.0
"""The port rounds in another order than Hugging Face does; each of the two may be as far from the truth."""


@dataclass(frozen=True)
class LogitsNoise:
    """Measured noise.

    Args:
        dtype: what the port computes in.
        positions: how many next-token distributions were compared.
        logit_error: largest difference of any logit.
        relative_error: that difference over the largest logit of its position, the largest of all positions.
        gap_error: largest change of the gap between the best token and one of the next seven.
        typical_gap_error: its median.
        flips: positions where the best token changed.
        near_tie_tolerance: gaps up to this are near-ties.
        resolved: share of positions whose gap between best and second token exceeds the tolerance: what a wrong
            token could be told apart at.
    """

    dtype: str
    positions: int
    logit_error: float
    relative_error: float
    gap_error: float
    typical_gap_error: float
    flips: int
    near_tie_tolerance: float
    resolved: float

    def as_dict(self) -> dict[str, object]:
        """A JSON-ready dict."""
        return dict(vars(self))


def measure_noise(
    reference: Reference,
    texts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    tolerance: float | None = None,
) -> LogitsNoise:
    """Measure on these texts what `dtype` does to the base's logits.

    Args:
        reference: the base, as the oracle computes it.
        texts: token ids; a few hundred positions are enough.
        dtype: what the port computes in.
        tolerance: use this near-tie tolerance instead of the measured one.

    Raises:
        BaseModelError: a logit is not finite.
    """
    changed, _ = read_rounded(reference, texts, dtype)
    return compare_logits(reference.logits(texts), changed, dtype_name(dtype), tolerance=tolerance)


def compare_logits(
    oracle: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], dtype: str, *, tolerance: float | None = None
) -> LogitsNoise:
    """Noise figures from two sets of logits [S, V] over the same texts."""
    first, second = torch.cat(list(oracle)).double(), torch.cat([logits.double() for logits in changed])
    if not (first.isfinite().all() and second.isfinite().all()):
        raise BaseModelError(
            f"The reference has non-finite logits in {dtype} or as the oracle",
            expected="finite logits",
            found="inf or nan",
            next_step="Look at activations.check_activations; bfloat16 has the range of float32.",
        )
    difference = (first - second).abs()
    best = first.topk(min(CANDIDATES, first.shape[-1]), dim=-1)
    there = second.gather(-1, best.indices)
    gaps = best.values[:, :1] - best.values[:, 1:]
    gap_errors = ((there[:, :1] - there[:, 1:]) - gaps).abs()
    measured = SAFETY * gap_errors.max().item()
    chosen = measured if tolerance is None else tolerance
    return LogitsNoise(
        dtype=dtype,
        positions=len(first),
        logit_error=difference.max().item(),
        relative_error=(difference.max(-1).values / first.abs().max(-1).values.clamp(min=1e-30)).max().item(),
        gap_error=gap_errors.max().item(),
        typical_gap_error=gap_errors.median().item(),
        flips=int((first.argmax(-1) != second.argmax(-1)).sum()),
        near_tie_tolerance=chosen,
        resolved=(gaps[:, 0] > chosen).double().mean().item(),
    )


def relative_errors(logits: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Largest difference of each row of [n, V] logits over the oracle's largest logit of that row, float64 [n]."""
    difference = (logits.double() - oracle.double()).abs().amax(-1)
    return difference / oracle.double().abs().amax(-1).clamp(min=1e-30)


def relative_error(logits: torch.Tensor, oracle: torch.Tensor) -> float:
    """The worst row's."""
    return relative_errors(logits, oracle).max().item()


def measure_error(model_logits: Sequence[torch.Tensor], oracle: LogitsSource, texts: Sequence[Sequence[int]]) -> float:
    """Worst relative error of a model's logits [S, V] per text against an oracle's."""
    pairs = zip(model_logits, oracle.logits(texts), strict=True)
    return max((relative_error(ours, theirs) for ours, theirs in pairs), default=0.0)
