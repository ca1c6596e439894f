"""Cuts a conversion into spans: runs of target rows of a few MiB, each made and written by itself, in any order.

Spans are numbered the same way for any number of workers, so that a journal can name those that are done. They are
handed out in the order in which their values lie in the source files, which reads every file once from start to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from porting_kit.architectures.operations import Operation
from porting_kit.conversion.apply import FORWARD, build_target, cast_tensor, cut_piece
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor, plan_scalars, read_source
from porting_kit.conversion.row_map import PieceRows, RowMap, map_rows
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.weight_files import ITEM_BYTES

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet

SPAN_BYTES = 4 << 20
"""Target bytes of one span: small enough for a processor's cache, large enough that Python's share is small."""
WHOLE_COPIES = 3
"""Copies of a target that are in memory while it is made whole: joined, cast, cut."""

Write = Callable[[int, str, int, torch.Tensor], None]
"""rank, tensor name, first byte within the tensor, values."""


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of one target; the whole target when it has no row map.

    Args:
        number: its place in the plan, for the journal.
        planned: the target.
        rows: the target's row map, None to make it whole.
        memory_bytes: anonymous memory it takes while it is made.
        order: (file, byte) of its first value, for reading in file order.
    """

    number: int
    planned: PlannedTensor
    rows: RowMap | None
    start: int
    stop: int
    memory_bytes: int
    order: tuple[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of the target, ranks not counted."""
        if self.rows is None:
            return self.planned.num_bytes
        return (self.stop - self.start) * self.rows.width * ITEM_BYTES[self.planned.dtype]

    def placements(self) -> Iterator[tuple[PieceRows, int, int, int]]:
        """Where a mapped span's rows go: (a rank's share, first row and one past the last, byte in the rank's part)."""
        item = ITEM_BYTES[self.planned.dtype]
        for share in self.rows.pieces:
            for first, count, local in share.runs:
                low, high = max(first, self.start), min(first + count, self.stop)
                if low < high:
                    yield share, low, high, (local + low - first) * share.width * item

    def list_written(self) -> Iterator[tuple[int, str, int]]:
        """(rank, tensor name, bytes) of everything the span writes."""
        item = ITEM_BYTES[self.planned.dtype]
        if self.rows is None:
            for piece in self.planned.pieces:
                yield piece.rank, piece.name, math.prod(piece.shape) * item
            return
        for share, low, high, _ in self.placements():
            yield share.piece.rank, share.piece.name, (high - low) * share.width * item


class SpanMaker:
    """Makes spans of one plan from its sources. Threads may share it."""

    def __init__(self, plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> None:
        self.plan, self.source, self.heads = plan, source, heads
        self.scalars = plan_scalars(plan)

    def cut(self) -> list[Span]:
        """All spans, in the order of the source files."""
        spans: list[Span] = []
        for planned in self.plan.tensors:
            spans += self._cut_target(planned, len(spans))
        return sorted(spans, key=lambda span: (span.order, span.number))

    def _cut_target(self, planned: PlannedTensor, number: int) -> list[Span]:
        places = [self._locate(planned, name) for name in planned.sources]
        rows = None
        if places and all(source is not None and source.is_mapped(name) for source, name in places):
            rows = map_rows(planned, [source.shape(name) for source, name in places], self.plan.dims)
        if rows is None:
            first = ("", 0)
            if places and places[0][0] is not None:
                first = places[0][0].place(places[0][1])
            memory = planned.num_bytes * WHOLE_COPIES + sum(
                source.read_bytes(name) for source, name in places if source is not None
            )
            return [Span(number, planned, None, 0, 0, memory, first)]
        item = ITEM_BYTES[planned.dtype]
        step = max(SPAN_BYTES // (rows.width * item), 1)
        spans = []
        for start in range(0, rows.rows, step):
            stop = min(start + step, rows.rows)
            run = next(rows.find_runs(start, stop))
            source, name = places[max(run.source, 0)]
            file, offset = source.place(name)
            offset += run.first * rows.width * ITEM_BYTES[source.dtype(name)]
            memory = 4 * (stop - start) * rows.width * 4
            spans.append(Span(number + len(spans), planned, rows, start, stop, memory, (file, offset)))
        return spans

    def _locate(self, planned: PlannedTensor, name: str) -> tuple[TensorSource | None, str]:
        """The catalogue that holds a source, and its name there; None for zeros that stand for an absent bias."""
        if planned.origin != "heads" or self.heads is None:
            return self.source, name
        origin = self.heads.origins[name]
        return (self.heads.source, origin) if origin is not None else (None, name)

    def write(self, span: Span, write: Write) -> None:
        """Make one span and write it into every rank that holds a part of it.

        Raises:
            ConversionError: a value is not finite, or does not survive the cast.
        """
        if span.rows is None:
            self._write_whole(span.planned, write)
            return
        planned, rows = span.planned, span.rows
        places = [self._locate(planned, name) for name in planned.sources]
        parts = []
        for run in rows.find_runs(span.start, span.stop):
            source, name = places[run.source]
            parts.append(
                source.read_rows(name, run.first, run.first + run.count, rows.width)
                if run.source >= 0
                else torch.zeros(run.count, rows.width, dtype=getattr(torch, places[0][0].dtype(places[0][1])))
            )
        block = parts[0] if len(parts) == 1 else torch.cat(parts)
        block = self._change(block, rows.arithmetic)
        block = cast_tensor(block, getattr(torch, planned.dtype), planned.target)
        for share, low, high, place in span.placements():
            values = block[low - span.start : high - span.start]
            if share.columns:
                cut = [values[:, first:last] for first, last in share.columns]
                values = cut[0] if len(cut) == 1 else torch.cat(cut, 1)
            if share.piece.zero:
                values = torch.zeros_like(values)
            write(share.piece.rank, share.piece.name, place, values)
        del parts, block
        for run in rows.find_runs(span.start, span.stop):
            if run.source >= 0:
                source, name = places[run.source]
                row_bytes = rows.width * ITEM_BYTES[source.dtype(name)]
                source.release(name, run.first * row_bytes, (run.first + run.count) * row_bytes)

    def _change(self, block: torch.Tensor, arithmetic: Sequence[Operation]) -> torch.Tensor:
        for operation in arithmetic:
            block = FORWARD[type(operation)](block, operation, self.plan.dims, self.scalars)
        return block

    def _write_whole(self, planned: PlannedTensor, write: Write) -> None:
        sources = [read_source(planned, name, self.source, self.heads) for name in planned.sources]
        whole = build_target(planned, sources, self.plan.dims, self.scalars)
        for piece in planned.pieces:
            write(piece.rank, piece.name, 0, cut_piece(whole, planned, piece))
        del sources, whole
        for name in planned.sources:
            source, actual = self._locate(planned, name)
            if source is not None:
                source.release(actual)
