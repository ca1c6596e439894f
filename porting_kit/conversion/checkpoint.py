"""Writes a TensorRT-LLM checkpoint: one safetensors file a rank, then config.json, each under a temporary name first.

Sizes are known before the first value is read, so every file gets its header and its full length at once and tensors
are written into their places in one pass, whatever the number of ranks. A folder that holds config.json is complete.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.names import Shape
from porting_kit.conversion.weight_files import ITEM_BYTES, SAFETENSORS_DTYPES
from porting_kit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPE_CODES = {name: code for code, name in SAFETENSORS_DTYPES.items()}


class RankFile:
    """One rank's safetensors file, header first. Tensors may arrive in any order, from several threads.

    Args:
        path: final path; the values go to a temporary file beside it until `commit`.
        tensors: name -> (dtype, shape) of everything that will be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Shape]]) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.tensors = dict(tensors)
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
        self.pending = set(self.offsets)
        self.descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(self.descriptor, self.start + end)
            os.pwrite(self.descriptor, struct.pack("<Q", len(text)) + text, 0)
        except OSError:
            self.discard()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor into its place; it must have the planned size."""
        import torch

        offset, size = self.offsets[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        if len(data) != size:
            raise CheckpointError(f"{name} has {len(data)} bytes", expected=f"{size} bytes", where=self.path)
        view, place = memoryview(data), self.start + offset
        while view:
            written = os.pwrite(self.descriptor, view, place)
            view, place = view[written:], place + written
        self.pending.discard(name)

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

    def commit(self) -> None:
        """Flush to the disk and give the file its name. CheckpointError when a tensor was never written."""
        if self.pending:
            raise CheckpointError("tensors were never written", where=self.path, items=sorted(self.pending))
        os.fsync(self.descriptor)
        os.close(self.descriptor)
        self.descriptor = -1
        os.replace(self.partial, self.path)

    def discard(self) -> None:
        """Remove the unfinished file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.partial.unlink(missing_ok=True)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write config.json by way of a temporary name; it comes last and marks the checkpoint complete."""
    path = folder / "config.json"
    partial = folder / ".config.json.partial"
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(config, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the renames themselves
    finally:
        os.close(descriptor)
    return path
