"""Which tensors a file of torch.save holds: names, types, sizes and places.

The zip format is read without torch, and every class that a state dict does not need is refused; torch itself reads the
format before it.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

from porting_kit.conversion.tensor_entry import ITEM_BYTES, TensorEntry
from porting_kit.errors import PortingKitError

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class _Storage:
    """Stands for one storage record of a PyTorch pickle: dtype and archive key."""

    def __init__(self, dtype: str, key: str) -> None:
        self.dtype, self.key = dtype, key


class _Tensor:
    """Stands for one tensor of a PyTorch pickle."""

    def __init__(self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.storage, self.offset = storage, int(offset)
        self.shape, self.stride = tuple(shape), tuple(stride)


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple, stride: tuple, *_: object) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


def _rebuild_parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor


class _HeaderUnpickler(pickle.Unpickler):
    """Reads names and shapes of a state dict. Every class but the few a state dict needs is refused."""

    def find_class(self, module: str, name: str) -> object:
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _rebuild_tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _rebuild_parameter
        if module == "torch" and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which no state dict needs")

    def persistent_load(self, record: tuple) -> _Storage:
        _, dtype, key, *_ = record
        return _Storage(dtype, key)


def read_pickle_header(file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    """Names, shapes and places in a zip-format .bin/.pt; the older tar-less format is read by torch itself."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile:
        return _read_legacy_pickle(file, error)
    with archive:
        name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
        if name is None:
            raise error(
                f"{file.name} holds no state dict",
                expected="one entry data.pkl, as torch.save writes it",
                found=f"{len(archive.namelist())} entries",
                where=file,
                next_step="save the weights again with torch.save, or as safetensors",
            )
        try:
            with archive.open(name) as stream:
                state = _HeaderUnpickler(stream).load()
        except (pickle.UnpicklingError, ValueError, EOFError, TypeError) as problem:
            raise error(
                f"{file.name} is not a plain state dict",
                expected="tensors by name and nothing else",
                found=problem,
                where=file,
                next_step="save it again with torch.save(model.state_dict(), ...) or as safetensors",
            ) from None
        places = _StoragePlaces(archive, file, name.removesuffix("data.pkl"))
        return {
            name: TensorEntry(name, tensor.storage.dtype, tensor.shape, file, places.find(tensor))
            for name, tensor in _tensors_of(state, file, error)
        }


class _StoragePlaces:
    """Where values lie in a PyTorch zip: torch stores them as they are, one storage an entry, without compression."""

    def __init__(self, archive: zipfile.ZipFile, file: Path, prefix: str) -> None:
        self.archive, self.file, self.prefix = archive, file, prefix
        self._starts: dict[str, int | None] = {}
        names = archive.namelist()
        is_big = f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder").strip() != b"little"
        self._is_readable = not is_big

    def find(self, tensor: _Tensor) -> int | None:
        """First byte of a tensor in the file; None where torch must read it: compressed, strided or big-endian."""
        item, key = ITEM_BYTES[tensor.storage.dtype], tensor.storage.key
        if not self._is_readable or tensor.stride != _row_strides(tensor.shape):
            return None
        if key not in self._starts:
            self._starts[key] = self._find_start(key)
        start, size = self._starts[key], math.prod(tensor.shape) * item
        if start is None or tensor.offset * item + size > self.archive.getinfo(f"{self.prefix}data/{key}").file_size:
            return None
        return start + tensor.offset * item

    def _find_start(self, key: str) -> int | None:
        """First byte of a storage: behind its local header, whose two lengths differ from the directory's."""
        try:
            entry = self.archive.getinfo(f"{self.prefix}data/{key}")
        except KeyError:
            return None
        if entry.compress_type != zipfile.ZIP_STORED:
            return None
        with self.file.open("rb") as stream:
            stream.seek(entry.header_offset)
            header = stream.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            return None
        name, extra = struct.unpack("<HH", header[26:30])
        return entry.header_offset + 30 + name + extra


def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose rows lie one after the other."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _tensors_of(state: object, file: Path, error: type[PortingKitError]) -> list[tuple[str, _Tensor]]:
    if isinstance(state, dict) and set(state) == {"state_dict"}:
        state = state["state_dict"]
    if not isinstance(state, dict) or any(not isinstance(value, _Tensor) for value in state.values()):
        raise error(
            f"{file.name} is not a plain state dict",
            expected="tensors by name",
            found=type(state).__name__,
            where=file,
            next_step="save the state dict alone, or as safetensors",
        )
    return [(str(name), value) for name, value in state.items()]


def describe_load_error(problem: Exception) -> str:
    """Why torch could not read a file of plain tensors, without its advice to switch the protection off."""
    cause = re.search(r"WeightsUnpickler error:\s*([^\n]+)", str(problem))
    if cause is None:
        return str(problem).partition("\n")[0] if str(problem) else type(problem).__name__
    return cause[1].partition(" Please use ")[0].strip()


def _read_legacy_pickle(file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:
        raise error(
            f"{file.name} is neither a safetensors nor a PyTorch weight file, or is damaged",
            expected="a safetensors file, or one of torch.save",
            found=describe_load_error(problem),
            where=file,
            next_step="download the file again, or save it as safetensors",
        ) from None
    return {
        str(name): TensorEntry(str(name), str(value.dtype).removeprefix("torch."), tuple(value.shape), file)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
