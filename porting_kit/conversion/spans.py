"""Cuts a conversion into spans: runs of target rows of a few MiB, each made and written by itself, in any order.

Spans are numbered the same way for any number of workers, so that a journal can name those that are done. They are
handed out in the order in which their values lie in the source files, which reads every file once from start to end.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from porting_kit.architectures.operations import Operation
from porting_kit.conversion.apply import FORWARD, build_target, cast_tensor, check_values, cut_piece
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor, plan_scalars, read_source
from porting_kit.conversion.row_map import PieceRows, RowMap, map_rows
from porting_kit.conversion.tensor_entry import ITEM_BYTES
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import ConversionError

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet

SPAN_BYTES = 4 << 20
"""Target bytes of one span: small enough for a processor's cache, large enough that Python's share is small."""
BLOCK_VALUES = 1 << 19
"""Values that are moved at a time: with their copies they stay in a processor's second-level cache."""
SCRATCH_BYTES = 6 * 4 * BLOCK_VALUES
"""What one worker keeps for blocks, at most: the largest uses together in float32."""
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

    def placements(self, start: int, stop: int) -> Iterator[tuple[PieceRows, int, int, int]]:
        """Where target rows [start, stop) go: (a rank's share, first row and one past the last, byte in its part)."""
        item = ITEM_BYTES[self.planned.dtype]
        for share in self.rows.pieces:
            for first, count, local in share.runs:
                low, high = max(first, start), min(first + count, stop)
                if low < high:
                    yield share, low, high, (local + low - first) * share.width * item

    def list_written(self) -> Iterator[tuple[int, str, int]]:
        """(rank, tensor name, bytes) of everything the span writes."""
        item = ITEM_BYTES[self.planned.dtype]
        if self.rows is None:
            for piece in self.planned.pieces:
                yield piece.rank, piece.name, math.prod(piece.shape) * item
            return
        for share, low, high, _ in self.placements(self.start, self.stop):
            yield share.piece.rank, share.piece.name, (high - low) * share.width * item


class SpanMaker:
    """Makes spans of one plan from its sources. Threads may share it."""

    def __init__(self, plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> None:
        self.plan, self.source, self.heads = plan, source, heads
        self.scalars = plan_scalars(plan)
        self._local = threading.local()

    def cut(self) -> list[Span]:
        """All spans, in the order of the source files."""
        spans: list[Span] = []
        for planned in self.plan.tensors:
            spans += self._cut_target(planned, len(spans))
        return sorted(spans, key=lambda span: (span.order, span.number))

    def _cut_target(self, planned: PlannedTensor, number: int) -> list[Span]:
        places = [self._locate(planned, name) for name in planned.sources]
        rows = None
        if places and all(source is not None and source.has_rows(name) for source, name in places):
            rows = map_rows(planned, [source.shape(name) for source, name in places], self.plan.dims_of(planned))
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
            spans.append(Span(number + len(spans), planned, rows, start, stop, SCRATCH_BYTES, (file, offset)))
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
            ConversionError: a value is not finite, or does not survive the cast; names the files of its sources.
        """
        try:
            self._write(span, write)
        except ConversionError as error:
            raise error.at(self._name_sources(span.planned)) from None

    def _name_sources(self, planned: PlannedTensor) -> str:
        located = [self._locate(planned, name) for name in planned.sources]
        return "; ".join(f"{source.entries[name].file}: {name}" for source, name in located if source is not None)

    def _write(self, span: Span, write: Write) -> None:
        if span.rows is None:
            self._write_whole(span.planned, write)
            return
        rows = span.rows
        places = [self._locate(span.planned, name) for name in span.planned.sources]
        step = max(BLOCK_VALUES // max(rows.width, 1), 1)
        for start in range(span.start, span.stop, step):
            self._write_block(span, places, start, min(start + step, span.stop), write)

    def _write_block(
        self, span: Span, places: Sequence[tuple[TensorSource | None, str]], start: int, stop: int, write: Write
    ) -> None:
        """Rows [start, stop) of a span: few enough to stay in the processor's cache on their way."""
        rows, dtype = span.rows, getattr(torch, span.planned.dtype)
        block = self._read_block(span, places, start, stop)
        if rows.arithmetic:
            block = cast_tensor(self._change(block, rows.arithmetic), dtype, span.planned.target)
        else:
            check_values(block, dtype, span.planned.target)
            block = self._cast(block, dtype)
        for share, low, high, place in span.placements(start, stop):
            values = block[low - start : high - start]
            if share.columns:
                values = self._take_columns(values, share)
            write(share.piece.rank, share.piece.name, place, torch.zeros_like(values) if share.piece.zero else values)

    def _read_block(
        self, span: Span, places: Sequence[tuple[TensorSource | None, str]], start: int, stop: int
    ) -> torch.Tensor:
        """Runs of rows one after the other, in scratch memory."""
        width, runs = span.rows.width, list(span.rows.find_runs(start, stop))
        kinds = [getattr(torch, source.dtype(name)) for source, name in (places[max(run.source, 0)] for run in runs)]
        dtype = functools.reduce(torch.promote_types, kinds)
        block, first = self._scratch("block", dtype, (stop - start) * width), 0
        for run, kind in zip(runs, kinds, strict=True):
            part, first = block[first : first + run.count * width], first + run.count * width
            if run.source < 0:
                part.zero_()
                continue
            source, name = places[run.source]
            own = part if kind == dtype else self._scratch("part", kind, run.count * width)
            source.read_rows(name, run.first, run.first + run.count, width, out=own)
            if own is not part:
                part.copy_(own)
        return block.reshape(-1, width)

    def _cast(self, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block in another dtype, in scratch memory; between 16-bit types by way of float32, which is faster."""
        if block.dtype == dtype:
            return block
        if {block.dtype, dtype} == {torch.float16, torch.bfloat16}:
            block = self._scratch("wide", torch.float32, block.numel()).reshape(block.shape).copy_(block)
        return self._scratch("cast", dtype, block.numel()).reshape(block.shape).copy_(block)

    def _take_columns(self, block: torch.Tensor, share: PieceRows) -> torch.Tensor:
        """One rank's columns side by side, in scratch memory."""
        taken = self._scratch("columns", block.dtype, len(block) * share.width).reshape(len(block), share.width)
        first = 0
        for start, stop in share.columns:
            taken[:, first : first + stop - start].copy_(block[:, start:stop])
            first += stop - start
        return taken

    def _scratch(self, use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Memory of this thread for one use, kept from block to block: fresh pages cost more than the work on them."""
        kept = self._local.__dict__.setdefault((use, dtype), None)
        if kept is None or kept.numel() < count:
            kept = self._local.__dict__[use, dtype] = torch.empty(max(count, BLOCK_VALUES), dtype=dtype)
        return kept[:count]

    def _change(self, block: torch.Tensor, arithmetic: Sequence[Operation]) -> torch.Tensor:
        for operation in arithmetic:
            block = FORWARD[type(operation)](block, operation, self.plan.dims, self.scalars)
        return block

    def _write_whole(self, planned: PlannedTensor, write: Write) -> None:
        sources = [read_source(planned, name, self.source, self.heads) for name in planned.sources]
        whole = build_target(planned, sources, self.plan.dims_of(planned), self.scalars)
        for piece in planned.pieces:
            write(piece.rank, piece.name, 0, cut_piece(whole, planned, piece))
