"""The way back: from the written files through the inverse rules to the source, compared bit for bit.

A rule that only moves values must give back the source exactly (after the cast to the checkpoint's dtype); one that
adds or scales must do so within one rounding. The target is what was read again from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from porting_kit.architectures import operations as ops
from porting_kit.architectures.operations import MOVING
from porting_kit.conversion.apply import BACKWARD, apply_operations, invert_operations
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor, plan_scalars
from porting_kit.errors import ConversionError


def verify_target(
    planned: PlannedTensor, whole: torch.Tensor, sources: Sequence[torch.Tensor], plan: ConversionPlan
) -> None:
    """Compare one whole target (vocabulary padding removed) with its sources; ConversionError when they differ."""
    if planned.origin == "zeros":
        if bool(whole.any()):
            raise ConversionError(
                f"{planned.target} should be zero and is not",
                expected="zeros: the base has no such bias",
                found="other values",
                next_step="convert again; if it stays, the disk or the memory is faulty",
            )
        return
    scalars = plan_scalars(plan)
    kinds = {type(operation) for operation in planned.operations}
    if kinds - set(MOVING) - set(BACKWARD):
        _compare_forward(planned, whole, sources, plan)
        return
    shapes = [tuple(tensor.shape) for tensor in sources]
    found = invert_operations(planned.operations, whole, shapes, planned.group, plan.dims_of(planned), scalars)
    same: Callable[[torch.Tensor, torch.Tensor], bool] = _same_bits
    if kinds & {ops.Add, ops.Scale}:
        rounding = torch.finfo(whole.dtype).eps * max(1.0, float(whole.abs().max()))
        same = lambda a, b: bool((a.float() - b.float()).abs().max() <= rounding)  # noqa: E731
    for name, back, original in zip(planned.sources, found, sources, strict=True):
        expected = original if kinds & {ops.Add, ops.Scale} else original.to(whole.dtype)
        if back.shape != expected.shape or not same(back, expected):
            raise ConversionError(
                f"{planned.target} does not lead back to {name}",
                expected="the source's values, moved only" if same is _same_bits else "the source within one rounding",
                found=f"{int((back != expected).sum()) if back.shape == expected.shape else 'all'} values differ",
                next_step="convert again; if it stays, the disk or the memory is faulty",
            )


def verify_fitted(planned: PlannedTensor, joined: torch.Tensor, whole: torch.Tensor) -> None:
    """Compare what was read again with a fitted target: a kernel fit has no way back.

    The unfitted values were proved before they were changed.

    Raises:
        ConversionError: the ranks' parts do not make up the fitted target.
    """
    if joined.shape != whole.shape or not _same_bits(joined, whole):
        raise ConversionError(
            f"{planned.target} on the disk is not what the kernel fit made",
            expected=f"the same bits, shape {list(whole.shape)}",
            found=f"shape {list(joined.shape)}",
            next_step="convert again; if it stays, the disk or the memory is faulty",
        )


def _compare_forward(
    planned: PlannedTensor, whole: torch.Tensor, sources: Sequence[torch.Tensor], plan: ConversionPlan
) -> None:
    """Rules that leave rows out or lose lengths have no way back: compare what is left of the source."""
    dims, scalars = plan.dims_of(planned), plan_scalars(plan)
    again = apply_operations(planned.operations, sources, planned.group, dims, scalars).to(whole.dtype)
    if not _same_bits(again, whole):
        raise ConversionError(
            f"{planned.target} does not follow from {', '.join(planned.sources)}",
            expected="the bits that the rules make of them",
            found="others",
            next_step="convert again; if it stays, the disk or the memory is faulty",
        )


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = views[first.element_size()]
    return first.dtype == second.dtype and torch.equal(first.contiguous().view(view), second.contiguous().view(view))
