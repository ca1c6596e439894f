"""A quantised matrix's scales against the base's own matrix: is one of them off by a few percent?

The factor between base and stored matrix is taken by row, by column and as a whole, against the factor that rounding
the base with the stored scales gives. In 4 bit that factor is too coarse for one group of inputs, where two other marks
tell: the largest number that the scale gives, and every number that another scale must have given.
"""

from __future__ import annotations

import torch

from porting_kit.conversion.dequantised import StoredMatrix
from porting_kit.conversion.quantised_files import Algorithm

SCALE_FLOOR = 0.005
"""A factor that is nearer to the expected one than this is no fault: what 16-bit scales and half precision cost."""
SCALE_DEVIATIONS = 6.0
"""Standard errors of a fitted factor that chance may take; among a million rows it takes five."""
ROUNDINGS = 4
"""Between a base's number over its stored scale and the same as the quantiser had it: of the weight as it was loaded,
of its product with the smoothing, of the stored smoothing and of the stored scale. Each moves it by half a unit in the
last place at most, relative; the quotient that is rounded to a whole number is one more. The largest of groups of 32 in
files of nvidia-modelopt 0.47.0 were 2.2 such halves apart in float16 and 2.4 in bfloat16."""
RULE_SHARE = 0.95
"""Groups whose scale follows the largest number where a quantiser takes it so: all of them. One that searches for a
better scale (awq_clip of nvidia-modelopt 0.47.0) has the commonest ratio in a quarter of them."""
CHANCE_NUMBERS = 2
"""Of the 212 million numbers of SmolLM2 in AWQ and SmoothQuant none was off; one scale of 576 inputs that is 2 % off
turns 8 and more."""
WIDEST_TEST = 0.5
"""A row whose factor is known no better than this has nothing to be judged by: all zero, or a few numbers."""


def find_scale_fault(matrix: StoredMatrix, wanted: torch.Tensor, algorithm: Algorithm) -> str | None:
    """The first row, column, group or the whole matrix whose scale is off, in words; None when none is.

    Args:
        matrix: as stored.
        wanted: the base's own, float32 [out, in].
    """
    stored, rounded = matrix.weight, round_with(matrix, wanted, algorithm)
    for what, dim in (("the whole matrix", None), ("row", 1), ("column", 0)):
        if dim is not None and what == "column" and matrix.prequant is None:
            continue
        found, deviation = _fit_factor(wanted, stored, dim)
        expected, _ = _fit_factor(wanted, rounded, dim)
        allowed = SCALE_FLOOR + SCALE_DEVIATIONS * deviation
        off = (found / expected - 1).abs()
        judged = torch.isfinite(off) & torch.isfinite(allowed) & (allowed < WIDEST_TEST)
        wrong = (judged & (off > allowed)).nonzero().reshape(-1)
        if len(wrong):
            place = int(wrong[0])
            factor = float((expected / found)[place])
            where = what if dim is None else f"{what} {place}"
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return f"the scale of {where} is {factor:.4g} times what it should be{more}"
    exact = (wanted if matrix.prequant is None else wanted / matrix.prequant[None]) / matrix.spread_scale
    rounding = _find_unit_roundoff(wanted)
    return _find_wrong_group(matrix, exact, rounding) or _find_wrong_numbers(matrix, exact, rounding, algorithm)


def _find_unit_roundoff(wanted: torch.Tensor) -> float:
    """Half a unit in the last place, relative, of the coarsest type that holds the base's numbers as they are.

    A quantiser computes in the type that it loads, and a checkpoint does not say which that was.
    """
    is_coarse = torch.equal(wanted, wanted.to(torch.bfloat16).float())
    return torch.finfo(torch.bfloat16 if is_coarse else torch.float16).eps / 2


def _find_wrong_group(matrix: StoredMatrix, exact: torch.Tensor, rounding: float) -> str | None:
    """The first group of inputs whose scale is not what its largest number asks for, None when all are.

    Where a quantiser takes scales from the largest numbers, those all come to the same number over their scales, to
    `ROUNDINGS`. Where it does not, nothing is said: then one group is told by its numbers alone, if at all, as an
    offset of 2 % turns one of 32 inputs.
    """
    if matrix.scale.ndim != 2:
        return None
    largest = exact.reshape(*matrix.scale.shape, -1).abs().amax(-1)
    ratio = largest / largest[largest > 0].median()
    wrong = ((ratio - 1).abs() > ROUNDINGS * rounding) & (largest > 0)
    count = int(wrong.sum())
    if not 0 < count <= (1 - RULE_SHARE) * wrong.numel():
        return None
    row, group = wrong.nonzero()[0].tolist()
    more = f", and {count - 1} more" if count > 1 else ""
    factor = float(1 / ratio[row, group])
    return f"the scale of row {row}, group {group} is {factor:.4g} times what its largest number asks for{more}"


def _find_wrong_numbers(matrix: StoredMatrix, exact: torch.Tensor, rounding: float, algorithm: Algorithm) -> str | None:
    """Numbers that are not the nearest to `exact`, the base's matrix over the stored scales; None when all are.

    All supported formats round to the nearest number, so this shows a scale that the factor of a short row in 4 bit
    cannot; numbers that were cut off at the end of their range are left out. One number that is more than a step off
    is enough, of nearer ones more than `CHANCE_NUMBERS`.
    """
    tolerance = (ROUNDINGS + 1) * rounding
    least, most = exact * (1 - tolerance), exact * (1 + tolerance)
    if algorithm.name == "FP8":
        rounded = [edge.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() for edge in (least, most)]
        wrong = (matrix.numbers < torch.minimum(*rounded)) | (matrix.numbers > torch.maximum(*rounded))
        far = ((matrix.numbers - exact).abs() > exact.abs() / 4 + 2.0**-6) & (exact.abs() < 448.0)
    else:
        limit = (1 << (algorithm.bits - 1)) - 0.5
        off = (matrix.numbers - exact).abs() - 0.5 - (most - least).abs() / 2
        wrong = (off > 0) & (exact.abs() < limit)
        far = wrong & (off > 1)
    count = int(wrong.sum())
    if count <= CHANCE_NUMBERS and not far.any():
        return None
    row = int(wrong.sum(1).argmax())
    return f"{count} of {wrong.numel()} numbers are not what the base's matrix gives by these scales, most in row {row}"


def round_with(matrix: StoredMatrix, wanted: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """What the base's matrix becomes when it is rounded with the stored scales."""
    scale, prequant = matrix.spread_scale, matrix.prequant
    numbers = (wanted if prequant is None else wanted / prequant[None]) / scale
    if algorithm.name == "FP8":
        numbers = numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    else:
        limit = 1 << (algorithm.bits - 1)
        numbers = numbers.round().clamp(-limit, limit - 1)
    rounded = numbers * scale
    return rounded if prequant is None else rounded * prequant[None]


def _fit_factor(wanted: torch.Tensor, stored: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor that takes `stored` nearest to `wanted`, over a dimension or all, and its standard error.

    The error is the one that holds where a few numbers outweigh the rest (HC3 of MacKinnon and White, 1985): in groups
    with scales of their own a column may hang on one number, and on which way that was rounded.
    """
    dims = (0, 1) if dim is None else (dim,)
    weights = stored * stored
    square = weights.sum(dims, keepdim=True)
    factor = (stored * wanted).sum(dims, keepdim=True) / square
    rest = stored * (wanted - factor * stored) / (1 - weights / square)
    return factor.reshape(-1), (rest.square().sum(dims, keepdim=True).sqrt() / square).reshape(-1)
