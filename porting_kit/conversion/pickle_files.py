"""Which tensors a file of torch.save holds: names, types, sizes and places.

The zip format is read without torch, and every class that a state dict does not need is refused; torch itself reads the
format before it.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.conversion.tensor_entry import ITEM_BYTES, TensorEntry
from porting_kit.errors import PortingKitError

if TYPE_CHECKING:
    import torch

ZIP_START = b"PK\x03\x04"
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
        numbers = (offset, *shape, *stride)
        is_whole = all(type(number) is int and number >= 0 for number in numbers) and len(shape) == len(stride)
        if not isinstance(storage, _Storage) or not is_whole:
            raise pickle.UnpicklingError("the pickle holds a tensor without a storage, sizes or steps")
        self.storage, self.dtype, self.offset = storage, storage.dtype, offset
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
        if dtype not in ITEM_BYTES:
            raise pickle.UnpicklingError(f"the pickle names a storage of {dtype!r}")
        return _Storage(dtype, key)


def read_pickle_header(file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    """The tensors of one file of torch.save, by name, without their values.

    Raises:
        error: the file is damaged, or holds anything but tensors by name.
    """
    if not _is_zip(file):
        return {
            name: TensorEntry(name, _name_dtype(value), tuple(value.shape), file)
            for name, value in load_state(file, error).items()
        }
    try:
        with _open_zip(file) as archive:
            return _read_zip_header(_Parts(archive, file), file, error)
    except PortingKitError:
        raise
    except Exception as problem:  # what a damaged zip makes zipfile raise has no common class
        raise _damaged(file, problem, error) from None


def load_state(file: Path, error: type[PortingKitError]) -> dict[str, torch.Tensor]:
    """The tensors of one file of torch.save with their values, read by torch.

    Raises:
        error: see `read_pickle_header`.
    """
    import torch

    try:
        if _is_zip(file):
            with _open_zip(file) as archive:
                _Parts(archive, file).check()
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:
        raise _damaged(file, problem, error) from None
    return dict(_tensors_of(state, torch.Tensor, file, error))


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == ZIP_START


def _open_zip(file: Path) -> zipfile.ZipFile:
    """Open a zip. Raises BadZipFile, which says it plainly when the end is not there."""
    if not zipfile.is_zipfile(file):
        raise zipfile.BadZipFile("a zip without the directory at its end: the file is cut short or damaged")
    return zipfile.ZipFile(file)


def _damaged(file: Path, problem: Exception, error: type[PortingKitError]) -> PortingKitError:
    return error(
        f"{file.name} is neither a safetensors nor a PyTorch weight file, or is damaged",
        expected="a safetensors file, or one of torch.save",
        found=_describe_load_error(problem),
        where=file,
        next_step="download the file again, or save it as safetensors",
    )


def _describe_load_error(problem: Exception) -> str:
    """Why a file of plain tensors could not be read, without torch's advice to switch the protection off."""
    cause = re.search(r"WeightsUnpickler error:\s*([^\n]+)", str(problem))
    if cause is None:
        return str(problem).partition("\n")[0] or type(problem).__name__
    return cause[1].partition(" Please use ")[0].strip()


def _read_zip_header(parts: _Parts, file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    record = next((name for name in parts.names if name.endswith("/data.pkl")), None)
    if record is None:
        raise error(
            f"{file.name} holds no state dict",
            expected="one entry data.pkl, as torch.save writes it",
            found=f"{len(parts.names)} entries",
            where=file,
            next_step="save the weights again with torch.save, or as safetensors",
        )
    content = parts.read(record)
    try:
        state = _HeaderUnpickler(io.BytesIO(content)).load()
    except Exception as problem:  # a pickle runs what it says, and so fails in any way
        raise error(
            f"{file.name} is not a plain state dict",
            expected="tensors by name and nothing else",
            found=problem,
            where=file,
            next_step="save it again with torch.save(model.state_dict(), ...) or as safetensors",
        ) from None
    prefix = record.removesuffix("data.pkl")
    order = f"{prefix}byteorder"
    is_big = order in parts.names and parts.read(order).strip() != b"little"
    return {
        name: _describe_tensor(name, tensor, parts, f"{prefix}data/{tensor.storage.key}", is_big)
        for name, tensor in _tensors_of(state, _Tensor, file, error)
    }


def _describe_tensor(name: str, tensor: _Tensor, parts: _Parts, storage: str, is_big: bool) -> TensorEntry:
    """Type, sizes and place of a tensor; no place where torch must read it: compressed, strided or big-endian."""
    dtype, shape = tensor.dtype, tensor.shape
    start, size = parts.find(storage)
    last = sum((length - 1) * step for length, step in zip(shape, tensor.stride, strict=True)) if all(shape) else -1
    first, end = tensor.offset * ITEM_BYTES[dtype], (tensor.offset + last + 1) * ITEM_BYTES[dtype]
    if end > size:
        raise ValueError(f"{name} ends at byte {end} of a storage of {size}")
    if start is None or is_big or tensor.stride != _row_strides(shape):
        return TensorEntry(name, dtype, shape, parts.file)
    checksum = parts.checksum(storage) if (first, end) == (0, size) else None
    return TensorEntry(name, dtype, shape, parts.file, start + first, checksum)


def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose rows lie one after the other."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


class _Parts:
    """The parts of a PyTorch zip. torch stores each as it is, without compression, and says at which checksum."""

    def __init__(self, archive: zipfile.ZipFile, file: Path) -> None:
        self.archive, self.file = archive, file
        self.names = archive.namelist()

    def checksum(self, name: str) -> int | None:
        """CRC-32 of a part; None for the 0 that torch writes when it is told to compute none (set_crc32_options)."""
        return self.archive.getinfo(name).CRC or None

    def find(self, name: str) -> tuple[int | None, int]:
        """First byte of a part, None when it is compressed, and its size. Raises BadZipFile where it does not begin.

        It lies behind its local header, whose two lengths differ from the directory's.
        """
        entry = self.archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            return None, entry.file_size
        with self.file.open("rb") as stream:
            stream.seek(entry.header_offset)
            header = stream.read(30)
        if len(header) < 30 or header[:4] != ZIP_START:
            raise zipfile.BadZipFile(f"{name} is not where the directory says")
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if start + entry.file_size > self.file.stat().st_size:
            raise zipfile.BadZipFile(f"{name} ends beyond the file")
        return start, entry.file_size

    def read(self, name: str) -> bytes:
        """A part's content. Raises BadZipFile when it is not what its checksum says."""
        start, size = self.find(name)
        if start is None:
            return self.archive.read(name)
        with self.file.open("rb") as stream:
            stream.seek(start)
            content = stream.read(size)
        if self.checksum(name) not in (None, zlib.crc32(content)):
            raise zipfile.BadZipFile(f"the checksum of {name} is not the file's")
        return content

    def check(self) -> None:
        """Read all. Raises BadZipFile when a part is not what its checksum says."""
        for name in self.names:
            self.read(name)


def _tensors_of(state: object, tensor_class: type, file: Path, error: type[PortingKitError]) -> list[tuple[str, Any]]:
    """Names and tensors of a state dict, also of one inside `state_dict`."""
    if isinstance(state, dict) and set(state) == {"state_dict"}:
        state = state["state_dict"]
    if not isinstance(state, dict):
        found, others = type(state).__name__, []
    elif others := [f"{name}: {kind}" for name, value in state.items() if (kind := _find_misfit(value, tensor_class))]:
        found = f"{len(others)} of {len(state)} are something else"
    else:
        return [(str(name), value) for name, value in state.items()]
    raise error(
        f"{file.name} is not a plain state dict",
        expected="tensors by name",
        found=found,
        where=file,
        items=others,
        next_step="save the state dict alone, or as safetensors",
    )


def _find_misfit(value: object, tensor_class: type) -> str | None:
    """What a value is, when it is no dense tensor of a type that weights have."""
    if not isinstance(value, tensor_class):
        return type(value).__name__
    if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        return str(value.layout)
    return None if _name_dtype(value) in ITEM_BYTES else _name_dtype(value)


def _name_dtype(tensor: torch.Tensor | _Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
