"""What an interrupted conversion has finished, so that the next run goes on instead of starting again.

Beside the unfinished files lie a lock, which only one process can hold, and a journal. The journal's first line says
what is being converted: plan, source files with size and time stamp, versions. Each further line names spans whose
bytes are on the disk: they are flushed before the line is written, so the journal never promises more than there is,
not even after a power cut. A torn last line is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.conversion.planned import ConversionPlan
from porting_kit.errors import CheckpointError
from porting_kit.provenance import describe_environment

if TYPE_CHECKING:
    from porting_kit.conversion.checkpoint import RankFile
    from porting_kit.conversion.tensor_source import TensorSource

JOURNAL = ".conversion.journal"
LOCK = ".conversion.lock"
FLUSH_BYTES = 256 << 20
FLUSH_SECONDS = 2.0
FORMAT = 2
"""Changes when spans are cut or numbered differently: a journal of another format is not used."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an output folder for this process; the lock goes with the process, however it ends.

    Raises:
        CheckpointError: another process holds it.
    """
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                "the output folder is in use by another run",
                expected="one run at a time",
                found=f"process {owner or 'unknown'} is converting into it",
                where=folder,
                next_step="wait for it, or name another output folder",
            ) from None
        # the run before may have removed the file between our open and our lock
        if path.exists() and os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def describe_conversion(plan: ConversionPlan, sources: Iterable[TensorSource], config: Any) -> dict[str, Any]:
    """What must be equal for an interrupted conversion to be continued."""
    return {
        "format": FORMAT,
        "plan": plan.rules_digest,
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "sources": {file: list(state) for source in sources for file, state in sorted(source.identity.items())},
        "versions": describe_environment(),
    }


def read_journal(folder: Path, description: dict[str, Any]) -> tuple[set[int] | None, str]:
    """The spans that an interrupted run of the same conversion finished.

    Returns:
        (span numbers, ""); or (None, why the interrupted run cannot be continued, "" when there was none).
    """
    path = folder / JOURNAL
    if not path.is_file():
        return None, ""
    lines = path.read_bytes().split(b"\n")[:-1]  # what comes after the last newline was not finished
    try:
        first, *rest = [json.loads(line) for line in lines]
        done = {number for line in rest for number in line}
    except (ValueError, TypeError):
        return None, "its journal is damaged"
    changed = [key for key, value in description.items() if first.get(key) != value]
    if changed:
        return None, f"{' and '.join(changed)} changed since"
    return done, ""


class Journal:
    """Writes down finished spans, in the background, after their bytes are on the disk.

    Args:
        folder: the output folder.
        description: see `describe_conversion`.
        ranks: the files to flush before spans are written down.
        done: spans that an earlier run finished.
    """

    def __init__(
        self, folder: Path, description: dict[str, Any], ranks: Iterable[RankFile], done: Iterable[int] = ()
    ) -> None:
        self.path, self.ranks = folder / JOURNAL, list(ranks)
        lines = [json.dumps(description, default=str), *([json.dumps(sorted(done))] if done else [])]
        partial = self.path.with_name(f"{JOURNAL}.partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(partial, self.path)
        self._stream = self.path.open("a", encoding="utf-8")
        self._finished: list[int] = []
        self._bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._keep, name="conversion journal", daemon=True)
        self._thread.start()

    def note(self, number: int, num_bytes: int) -> None:
        """One span has been written. Raises the OSError that a flush in the background met."""
        with self._wake:
            if self._problem is not None:
                raise self._problem
            self._finished.append(number)
            self._bytes += num_bytes
            if self._bytes >= FLUSH_BYTES:
                self._wake.notify()

    def _keep(self) -> None:
        started = time.monotonic()
        while not self._closing:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._bytes >= FLUSH_BYTES, FLUSH_SECONDS)
            if self._closing or (self._bytes < FLUSH_BYTES and time.monotonic() - started < FLUSH_SECONDS):
                continue
            started = time.monotonic()
            try:
                self.flush()
            except OSError as problem:
                with self._wake:
                    self._problem = problem
                return

    def flush(self) -> None:
        """Put what was written onto the disk, then write it down."""
        with self._wake:
            finished, self._finished, self._bytes = self._finished, [], 0
        if not finished:
            return
        for file in self.ranks:
            file.flush()
        self._stream.write(json.dumps(finished) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self, flush: Callable[[], None] | None = None) -> None:
        """End the background thread; `flush` is called when it has ended."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if flush is not None:
            flush()
        self._stream.close()

    def remove(self) -> None:
        """The conversion is complete: nothing is left to continue."""
        self.path.unlink(missing_ok=True)
