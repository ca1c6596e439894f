"""Differences that have the size of rounding: the engine computed with fewer digits than the port file says.

TensorRT multiplies float32 with ten bits of mantissa (TF32) unless that is switched off, and a build in another dtype
than the port's is a setting. Neither is a fault of weights or code, and no hypothesis reproduces its digits: it is told
by its size, against the healthy port run in the coarser dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.noise import compare_logits, relative_errors
from porting_kit.diagnosis.hypotheses import context_logits, judge
from porting_kit.diagnosis.search import Search
from porting_kit.errors import PortingKitError

MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
"""float16 stands for TF32 as well, which has as many."""

TYPICAL_FACTOR = 2.0
"""The median error may be so many times that of the dtype: a fault that moves every logit a little is no rounding."""


@dataclass(frozen=True)
class CoarserArithmetic:
    """What rounding of this dtype leaves of an observation.

    Args:
        dtype: the coarser one.
        port_dtype: the port's.
        error: worst relative logit error that this dtype makes; the observed one stays below its bound.
        observed_error: of the observation's logits; None without them.
    """

    dtype: str
    port_dtype: str
    error: float
    observed_error: float | None

    @property
    def is_benign(self) -> bool:
        """TF32 is TensorRT's own default for float32."""
        return self.port_dtype == "float32" and self.dtype == "float16"

    def describe(self) -> str:
        """One sentence."""
        name = "TF32 or float16" if self.dtype == "float16" else self.dtype
        seen = "" if self.observed_error is None else f" (observed {self.observed_error:.1e}, {name} {self.error:.1e})"
        advice = (
            "TensorRT's default for float32 networks is TF32"
            if self.is_benign
            else f"look at the engine's own dtype, or at quantisation: the port file says {self.port_dtype}"
        )
        unsure = "" if seen else "; tokens alone do not tell it from a small fault, such as another form of GELU"
        return f"no fault of the list; the differences have the size of rounding in {name}{seen}: {advice}{unsure}"


def explain_by_rounding(search: Search) -> CoarserArithmetic | None:
    """The first coarser dtype whose rounding is as large as what was observed; None when none is.

    Args:
        search: the search, of which no fault fitted.
    """
    state = search.state
    own = str(state.dtype or state.config.get("dtype") or "float32")
    rows = [search.healthy_rows[index] for index in search.chosen]
    for dtype, bits in MANTISSA_BITS.items():
        if bits >= MANTISSA_BITS.get(own, 0):
            continue
        try:
            coarse = context_logits(replace(state, dtype=dtype).build(), search.focus)
            noise = compare_logits(_cut(rows), _cut(coarse), dtype)
        except (PortingKitError, RuntimeError):
            continue
        bound = ERROR_FACTOR * noise.relative_error
        allowing = replace(search.focus, tolerance=noise.near_tie_tolerance, logits_noise=bound)
        observed = _errors(search.focus.logits, rows)
        typical = _errors(coarse, rows)
        is_small = observed is None or observed.median() <= TYPICAL_FACTOR * typical.median()
        if is_small and judge(state, allowing, rows, search.healthy_lengths).unexplained == 0:
            worst = None if observed is None else float(observed.max())
            return CoarserArithmetic(dtype, own, noise.relative_error, worst)
    return None


def _cut(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.float().cpu() for row in rows]


def _errors(theirs: Sequence[torch.Tensor] | None, ours: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if theirs is None:
        return None
    pairs = zip(theirs, ours, strict=True)
    return torch.cat([relative_errors(a.cpu(), b.cpu()) for a, b in pairs]).nan_to_num(torch.inf)
