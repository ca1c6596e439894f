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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from porting_kit.conversion.pickle_files import load_state
from porting_kit.conversion.tensor_entry import ITEM_BYTES, TensorEntry
from porting_kit.conversion.weight_files import check_file, read_header
from porting_kit.errors import BaseModelError, PortingKitError
from porting_kit.run_folder import explain_problem, read_json

if TYPE_CHECKING:
    import torch

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


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


def open_tensor_source(path: str | Path) -> TensorSource:
    """Open the weights of a base model, reading headers only.

    Args:
        path: a model folder, one weight file, or a GGUF file.

    Raises:
        BaseModelError: no weights, a pointer file, a file cut short, a shard that is missing or holds other tensors
            than the index says, or one tensor in two shards.
    """
    path = Path(path)
    if path.suffix == ".gguf" or (path.is_dir() and _only_gguf(path)):
        from porting_kit.conversion.gguf_source import open_gguf_source

        return open_gguf_source(path if path.is_file() else _only_gguf(path))
    if path.is_file():
        return TensorSource(read_header(path), path)
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
            return TensorSource(_read_indexed(path / index_name), path)
    return TensorSource(_merge_files(_find_files(path)), path)


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    others = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return files[0] if len(files) == 1 and not others else None


def _find_files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).exists():
            return [folder / single]
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = [file for file in sorted(folder.glob(pattern)) if file.name not in HEAD_FILES]
        if files:
            return files
    heads = [name for name in HEAD_FILES if (folder / name).exists()]
    raise BaseModelError(
        "this folder holds Medusa heads only, not a base model" if heads else "the folder holds no weights",
        expected="model.safetensors, pytorch_model.bin, an index of shards, or one .gguf file",
        found=", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "an empty folder",
        where=folder,
        next_step="pass the base's folder as base and this one as heads" if heads else "fetch the model's weights",
    )


def _merge_files(files: Iterable[Path]) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    doubled: list[str] = []
    pairs: set[tuple[str, str]] = set()
    for file in files:
        for name, entry in read_header(file).items():
            if name in merged:
                doubled.append(name)
                pairs.add((merged[name].file.name, file.name))
            merged.setdefault(name, entry)
    if doubled:
        raise BaseModelError(
            f"{len(doubled)} tensors lie in two files",
            expected="each tensor once",
            found=", ".join(f"{a} and {b}" for a, b in sorted(pairs)),
            where=merged[doubled[0]].file.parent,
            items=doubled,
            next_step="remove the file that does not belong to this model",
        )
    return merged


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as a shard index says. Raises BaseModelError: it says something else."""
    try:
        document = read_json(index)
    except (OSError, ValueError) as problem:
        raise BaseModelError(
            "the shard index cannot be read",
            expected="a JSON object with weight_map",
            found=explain_problem(problem),
            where=index,
            next_step="fetch the index again",
        ) from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values()):
        return weight_map
    if not isinstance(document, dict) or "weight_map" not in document:
        found = "no weight_map"
    else:
        found = f"weight_map: {weight_map!r}"[:120]
    raise BaseModelError(
        "the shard index names no files",
        expected="weight_map, an object of tensor name and file name",
        found=found,
        where=index,
        next_step="fetch the index again",
    )


def _read_indexed(index: Path) -> dict[str, TensorEntry]:
    weight_map = _read_weight_map(index)
    files = sorted({index.parent / name for name in weight_map.values()})
    if absent := [file.name for file in files if not file.exists()]:
        raise BaseModelError(
            f"{len(absent)} of the {len(files)} shards that the index names are missing",
            expected="every shard of the index",
            where=index,
            items=absent,
            next_step="fetch the missing files",
        )
    for file in files:  # all of them first: a pointer in the last shard is found before the first is parsed
        check_file(file)
    entries = _merge_files(files)
    misplaced = [name for name, file in weight_map.items() if name not in entries or entries[name].file.name != file]
    unlisted = [name for name in entries if name not in weight_map]
    if misplaced or unlisted:
        raise BaseModelError(
            "the shard index and the shards disagree",
            expected="each tensor in the file the index names",
            found=f"{len(misplaced)} tensors not where the index says, {len(unlisted)} that it does not name",
            where=index,
            items=misplaced or unlisted,
            next_step="fetch index and shards of the same revision",
        )
    return entries
