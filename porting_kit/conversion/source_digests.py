"""SHA-256 of every source file, taken on a thread of its own while the conversion reads the same files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from porting_kit.conversion.tensor_source import TensorSource

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file that was read: path, bytes, time of the last change in ns, SHA-256."""

    path: str
    num_bytes: int
    modified_ns: int
    sha256: str


class SourceDigests:
    """Hashes the files of some sources in their order; leaving the context stops it."""

    def __init__(self, sources: Iterable[TensorSource]) -> None:
        self._states = {file: state for source in sources for file, state in source.identity.items()}
        self._found: dict[str, str] = {}
        self._problem: OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._hash_all, name="source digests", daemon=True)

    def __enter__(self) -> SourceDigests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def collect(self) -> tuple[SourceFile, ...]:
        """Wait for the digests of all files. Raises the OSError that reading met."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return tuple(SourceFile(file, size, time, self._found[file]) for file, (size, time, _) in self._states.items())

    def _hash_all(self) -> None:
        try:
            for file in self._states:
                self._found[file] = self._hash(Path(file))
        except OSError as problem:
            self._problem = problem

    def _hash(self, file: Path) -> str:
        digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
        with file.open("rb", buffering=0) as stream:
            while (count := stream.readinto(block)) and not self._stop.is_set():
                digest.update(memoryview(block)[:count])
        return digest.hexdigest()
