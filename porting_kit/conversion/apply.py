"""Moves values as the rules say, forwards (source to target, one rank's part) and backwards (parts to sources).

Operations that only move values run in the source's dtype; arithmetic runs in float32; the cast to the checkpoint's
dtype comes last and refuses values that would become infinite. This module does not read or write files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from porting_kit.architectures import operations as ops
from porting_kit.architectures.names import Dims, Shape, evaluate_dim
from porting_kit.architectures.operations import ONE_INPUT, Operation
from porting_kit.conversion.planned import Piece, PlannedTensor
from porting_kit.errors import ConversionError

Scalars = Mapping[str, float]


def _ungroup(tensor: torch.Tensor, operation: ops.Ungroup | ops.Group, dims: Dims) -> torch.Tensor:
    groups, parts, unit = operation.counts(dims)
    rows = tensor.reshape(groups, sum(parts), unit, *tensor.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in rows.split(list(parts), dim=1)])


def _group(tensor: torch.Tensor, operation: ops.Ungroup | ops.Group, dims: Dims) -> torch.Tensor:
    groups, parts, unit = operation.counts(dims)
    blocks = tensor.split([groups * part * unit for part in parts])
    rest = tensor.shape[1:]
    shaped = [block.reshape(groups, part, unit, *rest) for block, part in zip(blocks, parts, strict=True)]
    return torch.cat(shaped, dim=1).flatten(0, 2)


def _reorder(tensor: torch.Tensor, operation: ops.ReorderBlocks, order: Sequence[int]) -> torch.Tensor:
    blocks = tensor.chunk(len(order), dim=operation.dim)
    return torch.cat([blocks[index] for index in order], dim=operation.dim)


def _factor(operation: ops.Scale, scalars: Scalars) -> float:
    return float(scalars[operation.factor]) if isinstance(operation.factor, str) else operation.factor


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _take(tensor: torch.Tensor, operation: ops.Take, dims: Dims) -> torch.Tensor:
    start, stop = operation.bounds(dims)
    return tensor.narrow(operation.dim, start, stop - start)


FORWARD: dict[type, Callable[..., torch.Tensor]] = {
    ops.Ungroup: lambda t, o, d, s: _ungroup(t, o, d),
    ops.Group: lambda t, o, d, s: _group(t, o, d),
    ops.ReorderBlocks: lambda t, o, d, s: _reorder(t, o, o.order),
    ops.Transpose: lambda t, o, d, s: t.transpose(-1, -2),
    ops.Reshape: lambda t, o, d, s: t.reshape([evaluate_dim(size, d) for size in o.shape]),
    ops.Take: lambda t, o, d, s: _take(t, o, d),
    ops.SkipRows: lambda t, o, d, s: t[o.count :],
    ops.PadRows: lambda t, o, d, s: _pad_rows(t, evaluate_dim(o.to, d)),
    ops.Add: lambda t, o, d, s: t.float() + o.value,
    ops.Scale: lambda t, o, d, s: t.float() * _factor(o, s),
    ops.NormalizeRows: lambda t, o, d, s: torch.nn.functional.normalize(t.float(), dim=-1),
}
BACKWARD: dict[type, Callable[..., torch.Tensor]] = {
    ops.Ungroup: lambda t, o, d, s, shape: _group(t, o, d),
    ops.Group: lambda t, o, d, s, shape: _ungroup(t, o, d),
    ops.ReorderBlocks: lambda t, o, d, s, shape: _reorder(t, o, [o.order.index(k) for k in range(len(o.order))]),
    ops.Transpose: lambda t, o, d, s, shape: t.transpose(-1, -2),
    ops.Reshape: lambda t, o, d, s, shape: t.reshape(shape),
    ops.PadRows: lambda t, o, d, s, shape: t[: shape[0]],
    ops.Add: lambda t, o, d, s, shape: t.float() - o.value,
    ops.Scale: lambda t, o, d, s, shape: t.float() / _factor(o, s),
}


def apply_operations(
    operations: Sequence[Operation], tensors: Sequence[torch.Tensor], group: int, dims: Dims, scalars: Scalars
) -> torch.Tensor:
    """Run the operations of one target.

    Args:
        tensors: the sources in order.
        group: how many of them belong together when a rule repeats over experts.
        scalars: names that `Scale` may ask for.

    Returns:
        The whole target, not cast.
    """
    current = list(tensors)
    for operation in operations:
        if isinstance(operation, ops.Concatenate):
            step = group if len(current) > group > 1 else len(current)
            current = [torch.cat(current[k : k + step], operation.dim) for k in range(0, len(current), step)]
        elif isinstance(operation, ops.Stack):
            current = [torch.stack(current)]
        elif isinstance(operation, ops.Product):
            first, second = (tensor.float() for tensor in current)
            current = [first @ (second.T if operation.transposed else second)]
        else:
            current = [FORWARD[type(operation)](tensor, operation, dims, scalars) for tensor in current]
    (target,) = current
    return target


def invert_operations(
    operations: Sequence[Operation],
    target: torch.Tensor,
    shapes: Sequence[Shape],
    group: int,
    dims: Dims,
    scalars: Scalars,
) -> list[torch.Tensor]:
    """Run the operations backwards: the sources from the whole target.

    Args:
        shapes: shapes of the sources in order.

    Raises:
        KeyError: an operation that loses values (`Take`, `SkipRows`, `NormalizeRows`) has no inverse.
    """
    stages = _stage_shapes(operations, shapes, group, dims)
    current = [target]
    for operation, before in zip(reversed(operations), reversed(stages), strict=True):
        if isinstance(operation, ops.Stack):
            current = list(current[0].unbind(0))
        elif isinstance(operation, ops.Concatenate):
            step = len(before) // len(current)
            groups = [before[k : k + step] for k in range(0, len(before), step)]
            current = [
                part
                for joined, parts in zip(current, groups, strict=True)
                for part in joined.split([shape[operation.dim] for shape in parts], dim=operation.dim)
            ]
        else:
            inverse = BACKWARD[type(operation)]
            current = [inverse(t, operation, dims, scalars, shape) for t, shape in zip(current, before, strict=True)]
    return current


def _stage_shapes(
    operations: Sequence[Operation], shapes: Sequence[Shape], group: int, dims: Dims
) -> list[list[Shape]]:
    """The shapes that go into each operation."""
    stages, current = [], list(shapes)
    for operation in operations:
        stages.append(list(current))
        if isinstance(operation, ops.Concatenate):
            step = group if len(current) > group > 1 else len(current)
            parts = [current[k : k + step] for k in range(0, len(current), step)]
            current = [operation.output_shapes(part, dims)[0] for part in parts]
        elif isinstance(operation, ONE_INPUT):
            current = [operation.output_shapes([shape], dims)[0] for shape in current]
        else:
            current = operation.output_shapes(current, dims)
    return stages


def cast_tensor(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast to the checkpoint's dtype. Raises ConversionError, see `check_values`."""
    check_values(tensor, dtype, name)
    if {tensor.dtype, dtype} == {torch.float16, torch.bfloat16}:
        return tensor.float().to(dtype)  # the same values; by way of float32 is the faster way
    return tensor.to(dtype)


def check_values(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse what the checkpoint's dtype cannot hold.

    Raises:
        ConversionError: a value is not finite, or would not be after the cast.
    """
    if not tensor.is_floating_point():
        raise ConversionError(
            f"{name} is not a floating-point tensor",
            expected="unquantised weights",
            found=str(tensor.dtype),
            next_step="dequantise the model first",
        )
    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    limit = torch.finfo(dtype).max
    largest = max(abs(float(low)), abs(float(high)))
    if not largest <= limit:  # also true when it is nan
        finite = torch.isfinite(tensor).all().item()
        raise ConversionError(
            f"{name} does not fit {str(dtype).removeprefix('torch.')}" if finite else f"{name} holds inf or nan",
            expected=f"values up to {limit:g}" if finite else "finite values",
            found=f"{largest:g}" if finite else f"{int((~torch.isfinite(tensor)).sum())} values that are not finite",
            next_step="convert to bfloat16 or float32" if finite else "the weights are damaged: fetch them again",
        )


def cut_piece(target: torch.Tensor, planned: PlannedTensor, piece: Piece) -> torch.Tensor:
    """One rank's part of a whole target; contiguous."""
    if piece.zero:
        return torch.zeros(piece.shape, dtype=target.dtype)
    if not piece.slices:
        return target.contiguous()
    dim = planned.shard.dim
    parts = [target.narrow(dim, start, stop - start) for start, stop in piece.slices]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()


def pad_vocabulary(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Append `rows` copies of the last row.

    A padded column then ties with a real token at worst and never beats every real one; zero rows would win wherever
    all real logits are negative.
    """
    if rows == 0:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(rows, *tensor.shape[1:])])


def build_target(planned: PlannedTensor, tensors: Sequence[torch.Tensor], dims: Dims, scalars: Scalars) -> torch.Tensor:
    """The whole target in the checkpoint's dtype, vocabulary padding included.

    Raises:
        ConversionError: see `cast_tensor`.
    """
    dtype = getattr(torch, planned.dtype)
    if planned.origin == "zeros":
        return torch.zeros(planned.shape, dtype=dtype)
    whole = apply_operations(planned.operations, tensors, planned.group, dims, scalars)
    return pad_vocabulary(cast_tensor(whole, dtype, planned.target), planned.padded_rows)


def join_pieces(planned: PlannedTensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole target from all ranks' parts, vocabulary padding removed.

    Raises:
        ConversionError: two ranks hold different values where they must agree.
    """
    first = parts[0]
    if planned.shard.first_rank_only and any(bool(part.any()) for part in parts[1:]):
        raise ConversionError(
            f"{planned.target} should be zero on every rank but the first: the ranks are summed",
            expected="zeros on all ranks but the first",
            found="other values",
            next_step="convert again, or write the checkpoint again with its own tool",
        )
    if planned.shard.dim is None or not planned.pieces[0].slices:  # the same on all ranks
        if not planned.shard.first_rank_only and any(not torch.equal(first, part) for part in parts[1:]):
            raise ConversionError(
                f"ranks hold different copies of {planned.target}",
                expected="the same values on all ranks",
                found="different values",
                next_step="convert again, or write the checkpoint again with its own tool",
            )
        return first[: first.shape[0] - planned.padded_rows] if planned.padded_rows else first
    dim = planned.shard.dim
    whole = first.new_zeros(planned.shape)
    written: set[tuple[int, int]] = set()
    for piece, part in zip(planned.pieces, parts, strict=True):
        offset = 0
        for start, stop in piece.slices:
            values = part.narrow(dim, offset, stop - start)
            place = whole.narrow(dim, start, stop - start)
            if (start, stop) in written and not torch.equal(place, values):
                raise ConversionError(
                    f"ranks hold different copies of {planned.target}, rows {start} to {stop}",
                    expected="the same values on the ranks that hold these rows",
                    found="different values",
                    next_step="convert again, or write the checkpoint again with its own tool",
                )
            place.copy_(values)
            written.add((start, stop))
            offset += stop - start
    return whole.narrow(0, 0, planned.shape[0] - planned.padded_rows)
