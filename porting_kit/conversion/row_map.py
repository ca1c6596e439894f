"""Which source rows make which target rows, and which rank gets them, so that a target can be moved block by block.

Most rules only move whole rows (or single elements of a bias) and then change each element by itself. Applied to row
numbers instead of values they give a map, and any run of target rows can be made from a few runs of mapped source rows:
no tensor is ever in memory as a whole. Rules that mix within a row (a transpose) have no such map; their targets are
made whole. This module moves no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from porting_kit.architectures import operations as ops
from porting_kit.architectures.names import Dims, Shape
from porting_kit.architectures.operations import Operation
from porting_kit.conversion.apply import apply_operations, cut_piece, pad_vocabulary
from porting_kit.conversion.planned import Piece, PlannedTensor

ROW_MOVES = (ops.Ungroup, ops.Group, ops.SkipRows)
ELEMENTWISE = (ops.Add, ops.Scale, ops.NormalizeRows)
ALONG_A_DIM = (ops.Concatenate, ops.ReorderBlocks, ops.Take)


@dataclass(frozen=True)
class Run:
    """Target rows [start, start + count) are rows [first, first + count) of source number `source` (-1: zeros)."""

    start: int
    count: int
    source: int
    first: int


@dataclass(frozen=True)
class PieceRows:
    """One rank's share in rows of the whole target.

    Args:
        piece: the rank's part.
        runs: (target row, rows, row in the part), in order.
        columns: [start, stop) ranges of the last dimension, joined in order; empty for all columns.
        width: elements of one row of the part.
    """

    piece: Piece
    runs: tuple[tuple[int, int, int], ...]
    columns: tuple[tuple[int, int], ...]
    width: int


@dataclass(frozen=True)
class RowMap:
    """A target as rows of its sources.

    Args:
        rows: rows of the whole target, vocabulary padding included.
        width: elements of one row.
        runs: where the rows come from, in target order.
        arithmetic: what is then done to each element, in order.
        pieces: how ranks share the rows.
    """

    rows: int
    width: int
    runs: tuple[Run, ...]
    arithmetic: tuple[Operation, ...]
    pieces: tuple[PieceRows, ...]

    def find_runs(self, start: int, stop: int) -> Iterator[Run]:
        """The runs of target rows [start, stop), cut to them."""
        for run in self.runs:
            first, last = max(run.start, start), min(run.start + run.count, stop)
            if first < last:
                yield Run(first, last - first, run.source, run.first + first - run.start)


def map_rows(planned: PlannedTensor, shapes: Sequence[Shape], dims: Dims) -> RowMap | None:
    """The row map of a target; None when a rule mixes within rows.

    Args:
        shapes: shapes of the sources, in order.
    """
    if planned.origin == "zeros" or not _moves_rows(planned.operations, shapes):
        return None
    flat = len(planned.shape) == 1
    labels, bases, base = [], [], 1  # 0 stands for a row of zeros
    for shape in shapes:
        count = math.prod(shape if flat else shape[:-1])
        labels.append(torch.arange(base, base + count).reshape(shape if flat else shape[:-1]))
        bases.append(base)
        base += count + 1  # a gap, so that no run reaches over two sources
    moves = tuple(operation for operation in planned.operations if not isinstance(operation, ELEMENTWISE))
    moved = apply_operations(moves, labels, planned.group, dims, {})
    whole = pad_vocabulary(moved, planned.padded_rows)
    width = 1 if flat else planned.shape[-1]
    arithmetic = tuple(operation for operation in planned.operations if isinstance(operation, ELEMENTWISE))
    pieces = tuple(_share_rows(planned, piece, whole.shape, flat) for piece in planned.pieces)
    return RowMap(whole.numel(), width, _find_runs(whole.reshape(-1), bases), arithmetic, pieces)


def _moves_rows(operations: Sequence[Operation], shapes: Sequence[Shape]) -> bool:
    """Whether every operation leaves rows whole (dims are counted on the shapes that go in)."""
    dims = len(shapes[0])
    has_zeros = has_arithmetic = False
    for operation in operations:
        if isinstance(operation, ALONG_A_DIM):
            if not 0 <= operation.dim < max(dims - 1, 1):
                return False
        elif isinstance(operation, ops.Stack):
            if dims == 1:
                return False
            dims += 1
        elif isinstance(operation, ops.PadRows):
            has_zeros = True
        elif isinstance(operation, ELEMENTWISE):
            has_arithmetic = True
            if isinstance(operation, ops.NormalizeRows) and dims == 1:
                return False
        elif not isinstance(operation, ROW_MOVES):
            return False
    return not (has_zeros and has_arithmetic)  # adding to a row of zeros gives no row of zeros


def _find_runs(labels: torch.Tensor, bases: Sequence[int]) -> tuple[Run, ...]:
    """Equal steps of one in the labels, or repeated zeros, joined."""
    if labels.numel() == 0:
        return ()
    steps = labels[1:] - labels[:-1]
    joined = (steps == 1) & (labels[:-1] != 0) | (labels[1:] == 0) & (labels[:-1] == 0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), (~joined).nonzero().reshape(-1) + 1])
    stops = torch.cat([starts[1:], torch.tensor([labels.numel()])])
    runs = []
    for start, stop, label in zip(starts.tolist(), stops.tolist(), labels[starts].tolist(), strict=True):
        source = max((k for k, base in enumerate(bases) if base <= label), default=-1)
        runs.append(Run(start, stop - start, source, label - bases[source] if source >= 0 else 0))
    return tuple(runs)


def _share_rows(planned: PlannedTensor, piece: Piece, shape: Sequence[int], flat: bool) -> PieceRows:
    """Which rows (or columns) of the whole target one rank holds."""
    numbers = torch.arange(math.prod(shape)).reshape(tuple(shape))
    columns: tuple[tuple[int, int], ...] = ()
    if piece.slices and not flat and planned.shard.dim == len(planned.shape) - 1:
        columns = piece.slices
    else:
        numbers = cut_piece(numbers, planned, piece)
    local, runs = 0, []
    for run in _find_runs(numbers.reshape(-1) + 1, [1]):
        runs.append((run.first, run.count, local))
        local += run.count
    width = 1 if flat else piece.shape[-1]
    return PieceRows(piece, tuple(runs), columns, width)
