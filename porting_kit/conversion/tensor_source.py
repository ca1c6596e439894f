"""Where tensors are read from: one catalogue over the files of a model, values on demand.

Known: a folder of safetensors (single or sharded), of PyTorch .bin shards, one such file, or a GGUF file. The catalogue
is built from headers alone (no torch import); every file that an index names is checked before anything is converted.

Values are read, not mapped: a file that is cut short while it is read then gives an error, where a mapped one would end
the process. Rows can be read by themselves wherever the format says at which byte a tensor begins.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from porting_kit.conversion.pickle_files import load_state
from porting_kit.conversion.shards import read_indexed, read_shards
from porting_kit.conversion.tensor_entry import ITEM_BYTES, TensorEntry
from porting_kit.conversion.weight_files import read_header
from porting_kit.errors import BaseModelError, PortingKitError

if TYPE_CHECKING:
    import torch

HEAD_STEM = "medusa_lm_head"
"""How the names of files begin that hold heads and no base."""


class TensorSource:
    """Tensors by name over one or several files. Not safe to share between processes; threads may read."""

    def __init__(
        self, entries: Mapping[str, TensorEntry], where: Path, error: type[PortingKitError] = BaseModelError
    ) -> None:
        self.entries, self.where, self.error = dict(entries), where, error
        self._descriptors: dict[Path, int] = {}
        self._states: dict[Path, dict[str, torch.Tensor]] = {}
        self._opening = threading.Lock()
        self.identity = {str(file): _identify(file) for file in self.files()}

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self.entries[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as torch names it ("bfloat16"), from the header."""
        return self.entries[name].dtype

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.entries[name].file

    def files(self) -> tuple[Path, ...]:
        """All files that hold tensors, in order."""
        return tuple(dict.fromkeys(entry.file for entry in self.entries.values()))

    def has_rows(self, name: str) -> bool:
        """Whether rows of the tensor can be read by themselves, without memory for the rest."""
        return self.entries[name].offset is not None

    def place(self, name: str) -> tuple[str, int]:
        """(file, first byte) of a tensor, to read in file order."""
        entry = self.entries[name]
        return str(entry.file), entry.offset or 0

    def read_bytes(self, name: str) -> int:
        """Memory that `read` takes."""
        return self.entries[name].num_bytes

    def check_unchanged(self, file: Path) -> None:
        """Raise when a file is no longer the one whose header was read: size, time stamp or file number differ."""
        before, now = self.identity[str(file)], _identify(file)
        if now != before:
            raise self.error(
                f"{file.name} changed while it was read",
                expected=f"{before[0]} bytes, modified at {before[1] / 1e9:.3f} s",
                found="no such file any more" if now[0] < 0 else f"{now[0]} bytes, modified at {now[1] / 1e9:.3f} s",
                where=file,
                next_step="wait until the download or copy has finished, then run again",
            )

    def read_rows(self, name: str, start: int, stop: int, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor seen as [rows, width].

        Args:
            out: where the values go, flat, of the tensor's dtype; memory of its own when None.

        Raises:
            error: the file has changed since its header was read.
        """
        import torch

        entry = self.entries[name]
        self.check_unchanged(entry.file)
        count = (stop - start) * width
        if out is None:
            out = torch.empty(count, dtype=getattr(torch, entry.dtype))
        if count:
            self._fill(entry.file, _bytes_of(out), entry.offset + start * width * ITEM_BYTES[entry.dtype])
        return out.reshape(-1, width) if count else out.reshape(stop - start, width)

    def read(self, name: str) -> torch.Tensor:
        """The values, shape and dtype as in the file.

        Raises:
            error: the file has changed since its header was read, or the values are not what its checksum says.
        """
        entry = self.entries[name]
        if entry.offset is None:
            self.check_unchanged(entry.file)
            return self._state(entry.file)[name]
        count = entry.num_bytes // ITEM_BYTES[entry.dtype]
        values = self.read_rows(name, 0, count, 1)
        if entry.checksum is not None and zlib.crc32(_bytes_of(values)) != entry.checksum:
            raise self.error(
                f"{entry.file.name} is damaged",
                expected=f"the values of {name} that its checksum was made of",
                found="other values",
                where=entry.file,
                next_step="download the file again, or save it again",
            )
        return values.reshape(entry.shape)

    def _fill(self, file: Path, view: memoryview, offset: int) -> None:
        """Bytes of a file from `offset` on. Raises the source's error when it ends before."""
        descriptor = self._open(file)
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                self.check_unchanged(file)
                raise self.error(
                    f"{file.name} ends too early",
                    expected=f"{len(view)} bytes more from byte {offset} on",
                    where=file,
                    next_step="fetch the file again",
                )
            view, offset = view[count:], offset + count

    def _open(self, file: Path) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._descriptors[file]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    def _state(self, file: Path) -> dict[str, torch.Tensor]:
        with self._opening:
            if file not in self._states:
                self._states[file] = load_state(file, self.error)
            return self._states[file]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    import torch

    return memoryview(tensor.view(torch.uint8).numpy())


def _identify(file: Path) -> tuple[int, int, int]:
    """(bytes, time of the last change in ns, file number); negative when the file is gone."""
    try:
        state = os.stat(file)
    except OSError:
        return (-1, 0, 0)
    return (state.st_size, state.st_mtime_ns, state.st_ino)


def open_tensor_source(path: str | Path, error: type[PortingKitError] = BaseModelError) -> TensorSource:
    """Open the weights of a base model, reading headers only.

    Args:
        path: a model folder, one weight file, or a GGUF file.
        error: what is raised when the weights cannot be read.

    Raises:
        BaseModelError: no weights.
        error: a pointer file, a file cut short, a shard that is missing or holds other tensors than the index says, or
            one tensor in two shards.
    """
    path = Path(path)
    if path.suffix == ".gguf" or (path.is_dir() and _only_gguf(path)):
        from porting_kit.conversion.gguf_source import open_gguf_source

        return open_gguf_source(path if path.is_file() else _only_gguf(path))
    if path.is_file():
        return TensorSource(read_header(path, error), path, error)
    if not path.is_dir():
        raise BaseModelError(
            "the base model's folder does not exist",
            expected="a folder with weights, or a weight file",
            found="no such folder",
            where=path,
            next_step="correct base in the port file, or fetch the model",
        )
    for index_name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index_name).is_file():
            return TensorSource(read_indexed(path / index_name, error), path, error)
    return TensorSource(read_shards(_find_files(path), error), path, error)


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    others = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return files[0] if len(files) == 1 and not others else None


def _find_files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).exists():
            return [folder / single]
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(HEAD_STEM)]
        if files:
            return files
    heads = any(folder.glob(f"{HEAD_STEM}*"))
    raise BaseModelError(
        "this folder holds Medusa heads only, not a base model" if heads else "the folder holds no weights",
        expected="model.safetensors, pytorch_model.bin, an index of shards, or one .gguf file",
        found=", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "an empty folder",
        where=folder,
        next_step="pass the base's folder as base and this one as heads" if heads else "fetch the model's weights",
    )
