"""Runs the spans of a conversion on threads: bounded memory, progress, and an orderly stop.

Values are moved by torch and the kernel outside Python's lock, so threads help. Which thread makes a span changes
nothing in its bytes or its place. Memory does not grow with threads: together they hold no more than one bound.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from porting_kit.conversion.checkpoint import RankFile
from porting_kit.conversion.journal import Journal
from porting_kit.conversion.spans import Span, SpanMaker

MEMORY_BYTES = 192 << 20
"""Anonymous memory that spans in work may hold together; one span that needs more than this runs alone."""
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Args:
        done_bytes: written so far by this run and by an interrupted one before it, all ranks.
        total_bytes: of the whole checkpoint.
        seconds: since this run began.
        resumed_bytes: what an interrupted run had written.
    """

    done_bytes: int
    total_bytes: int
    seconds: float
    resumed_bytes: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Mean rate of this run."""
        return (self.done_bytes - self.resumed_bytes) / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the mean rate; None before anything was written."""
        rate = self.bytes_per_second
        return (self.total_bytes - self.done_bytes) / rate if rate > 0 else None


ShowProgress = Callable[[Progress], None]


class MemoryGate:
    """Lets work in as long as its memory fits the bound; what is larger than the bound goes in alone."""

    def __init__(self, bound: int) -> None:
        self.bound, self._held, self._room = bound, 0, threading.Condition()

    def enter(self, size: int) -> None:
        with self._room:
            self._room.wait_for(lambda: self._held == 0 or self._held + size <= self.bound)
            self._held += size

    def leave(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify_all()


def default_workers() -> int:
    """Threads when the caller names none: one a core, at most four (more wait for the disk)."""
    return max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def run_spans(
    maker: SpanMaker,
    spans: Sequence[Span],
    ranks: Sequence[RankFile],
    journal: Journal,
    done: set[int],
    *,
    workers: int,
    progress: ShowProgress | None = None,
) -> None:
    """Make and write all spans that are not done yet.

    Raises:
        what a span raises (ConversionError, OSError ...): the first problem; the other threads end their span first.
    """
    total = sum(size for file in ranks for _, size in file.offsets.values())
    for span in spans:
        if span.number in done:
            _replay(span, ranks)
    left = [span for span in spans if span.number not in done]
    resumed = total - _missing(ranks)
    gate, stop, started = MemoryGate(MEMORY_BYTES), threading.Event(), time.perf_counter()
    queue = iter(left)
    taking = threading.Lock()

    def write(rank: int, name: str, place: int, values: torch.Tensor) -> None:
        ranks[rank].write(name, values, place)

    def work() -> None:
        while not stop.is_set():
            with taking:
                span = next(queue, None)
            if span is None:
                return
            gate.enter(span.memory_bytes)
            try:
                maker.write(span, write)
            except BaseException:
                stop.set()
                raise
            finally:
                gate.leave(span.memory_bytes)
            journal.note(span.number, span.num_bytes)

    def show() -> None:
        if progress is not None:
            seconds = time.perf_counter() - started
            progress(Progress(total - _missing(ranks), total, seconds, resumed))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each worker is one thread; torch's own would only get in each other's way
    try:
        with ThreadPoolExecutor(workers, "conversion") as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            try:
                _watch(futures, show)
            except BaseException:
                stop.set()
                raise
    finally:
        torch.set_num_threads(threads)
    show()


def _watch(futures: Sequence[Future], show: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        show()


def _missing(ranks: Sequence[RankFile]) -> int:
    return sum(sum(list(file.missing.values())) for file in ranks)


def _replay(span: Span, ranks: Sequence[RankFile]) -> None:
    """Count what an earlier run wrote for a span."""
    for rank, name, count in span.list_written():
        ranks[rank].note_written(name, count)
