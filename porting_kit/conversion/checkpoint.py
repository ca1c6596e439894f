"""Writes a TensorRT-LLM checkpoint: one safetensors file a rank, then config.json, each under a temporary name first.

Sizes are known before the first value is read, so every file gets its header and its full length at once and tensors
are written into their places in one pass, whatever the number of ranks. A folder that holds config.json is complete.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.names import Shape
from porting_kit.conversion.tensor_entry import ITEM_BYTES
from porting_kit.conversion.weight_files import SAFETENSORS_DTYPES
from porting_kit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPE_CODES = {name: code for code, name in SAFETENSORS_DTYPES.items()}


class RankFile:
    """One rank's safetensors file, header first. Parts of tensors may arrive in any order, from several threads.

    Args:
        path: final path; the values go to a temporary file beside it until `commit`.
        tensors: name -> (dtype, shape) of everything that will be written.
        keep: go on with the temporary file of an interrupted run; what it holds must be told by `note_written`.
        take_named: with `keep`, a file that has its final name already is the interrupted run's as well.

    Raises:
        CheckpointError: `keep`, and the file there is not one of the same header and length.
        OSError: the disk is full, or the folder cannot be written.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, Shape]], *, keep: bool = False, take_named: bool = False
    ) -> None:
        self.path, self.partial = path, partial_path(path)
        self.tensors = dict(tensors)
        self._lock = threading.Lock()
        self.offsets: dict[str, tuple[int, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {
                "dtype": DTYPE_CODES[dtype],
                "shape": list(shape),
                "data_offsets": [end, end + size],
            }
            self.offsets[name] = (end, size)
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # values start on a multiple of eight, as the format asks
        self.start = 8 + len(text)
        self.missing = {name: size for name, (_, size) in self.offsets.items() if size}
        head = struct.pack("<Q", len(text)) + text
        self.descriptor = -1
        if keep:
            self._reopen(head, self.start + end, take_named)
            return
        self.descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.ftruncate(self.descriptor, self.start + end)
            os.pwrite(self.descriptor, head, 0)
        except OSError:
            self.discard()
            raise

    def _reopen(self, head: bytes, size: int, take_named: bool) -> None:
        """Open what an interrupted run left, under its temporary name or already under the final one."""
        if take_named and not self.partial.exists() and self.path.exists():
            os.replace(self.path, self.partial)
        try:
            self.descriptor = os.open(self.partial, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(
                "the interrupted file is gone",
                expected="the file that the interrupted run wrote into",
                found=error,
                where=self.partial,
                next_step="convert again: nothing of it is left to go on with",
            ) from None
        if os.fstat(self.descriptor).st_size != size or os.pread(self.descriptor, len(head), 0) != head:
            self.close()
            raise CheckpointError(
                "the interrupted file is of another conversion",
                expected="the header and the length of this conversion",
                found="others",
                where=self.partial,
                next_step="remove the file, and convert again",
            )

    def write(self, name: str, tensor: torch.Tensor, place: int = 0) -> None:
        """Put values into their place: a whole tensor, or a part that starts at byte `place` of the tensor."""
        import torch

        offset, size = self.offsets[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        if place + len(data) > size:
            raise CheckpointError(
                f"{name} has {len(data)} bytes",
                expected=f"{size} bytes",
                found=f"{len(data)} bytes from byte {place} on",
                where=self.path,
                next_step="report this: a plan and its tensor differ in size",
            )
        view, first = memoryview(data), self.start + offset + place
        while view:
            written = os.pwrite(self.descriptor, view, first)
            view, first = view[written:], first + written
        self.note_written(name, len(data))

    def note_written(self, name: str, count: int) -> None:
        """Count bytes of a tensor that are in the file."""
        with self._lock:
            left = self.missing.get(name, 0) - count
            self.missing[name] = left
            if left == 0:
                del self.missing[name]

    def flush(self) -> None:
        """Wait until everything written so far is on the disk."""
        os.fdatasync(self.descriptor)

    def read_back(self, name: str) -> torch.Tensor:
        """One tensor as it lies in the unfinished file."""
        import torch

        offset, size = self.offsets[name]
        dtype, shape = self.tensors[name]
        data = bytearray(os.pread(self.descriptor, size, self.start + offset))
        while len(data) < size:  # one read returns at most 2 GiB
            data += os.pread(self.descriptor, size - len(data), self.start + offset + len(data))
        if size == 0:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)

    def require_complete(self) -> None:
        """Raise CheckpointError when a part was never written."""
        if self.missing:
            raise CheckpointError(
                "tensors were never written",
                expected="every tensor of the plan",
                where=self.path,
                items=sorted(self.missing),
                next_step="convert again",
            )

    def commit(self) -> None:
        """Flush to the disk and give the file its name. CheckpointError when a part was never written."""
        self.require_complete()
        os.fsync(self.descriptor)
        self.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        """Close the file and leave it as it is, for a later run to go on with."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def discard(self) -> None:
        """Remove the unfinished file."""
        self.close()
        self.partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """The temporary name of a file that is not complete yet: hidden, in the same folder."""
    return path.with_name(f".{path.name}.partial")


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write config.json; it comes last and marks the checkpoint complete."""
    return write_document(folder / "config.json", config)


def write_document(path: Path, document: Any) -> Path:
    """Write JSON by way of a temporary name, flushed to the disk, folder entry included."""
    partial = partial_path(path)
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=2, default=str)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries: the renames themselves."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
