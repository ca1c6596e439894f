"""Which tensors a weight file holds, read from its header alone: safetensors and PyTorch's zip format.

Opening a file costs milliseconds and imports no torch, so a preflight can do it. A pointer left by git-lfs, a file cut
short, and a pickle that asks for anything but tensors are refused here, within the first read. This module does not
read values (`tensor_source` does).
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from porting_kit.errors import BaseModelError, PortingKitError

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
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
MAX_HEADER_BYTES = 100_000_000
WEB_PAGE = re.compile(rb"\s*<(!doctype|!--|\?xml|html|head|body|error)|Entry not found", re.IGNORECASE)
"""How an answer of a server begins. A safetensors file may begin with `<` as well: a header of 60 bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight file.

    Args:
        name: dotted name.
        dtype: torch's name of the dtype ("bfloat16").
        shape: sizes.
        file: the file that holds it.
        offset: first byte of the values in the file, None when the format does not give one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(file: Path, error: type[PortingKitError] = BaseModelError) -> dict[str, TensorEntry]:
    """The tensors of one .safetensors, .bin or .pt file, by name, without their values.

    Raises:
        error: the file is missing, a pointer, cut short, or not of its format.
    """
    check_file(file, error)
    if file.suffix == ".safetensors":
        return _read_safetensors_header(file, error)
    if file.suffix == ".json":
        raise error(
            f"{file.name} holds settings, not weights",
            expected="a .safetensors, .bin or .pt file, or the folder it lies in",
            found="a JSON file",
            where=file,
            next_step=f"name the folder: {file.parent}",
        )
    return _read_zip_pickle(file, error)


def check_file(file: Path, error: type[PortingKitError] = BaseModelError) -> None:
    """Refuse a file that is missing, empty, or a large-file pointer in place of weights."""
    if not file.is_file():
        raise error(
            "a weight file is missing",
            expected="a weight file",
            found="a folder" if file.is_dir() else "no such file",
            where=file,
            next_step="fetch the model, or write the checkpoint, again: all files",
        )
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise error(
            f"{file.name} is a {size}-byte pointer, not weights",
            expected="the tensors themselves",
            found="a git-lfs pointer",
            where=file,
            next_step="fetch the large files (`git lfs pull`) or download the model again",
        )
    if size == 0:
        raise error(
            f"{file.name} is empty", expected="weights", found="0 bytes", where=file, next_step="download it again"
        )
    if WEB_PAGE.match(start):
        raise error(
            f"{file.name} is a web page, not weights",
            expected="weights",
            found=start[:40].decode("utf-8", "replace"),
            where=file,
            next_step="download the file again",
        )


def _is_tensor_record(record: object) -> bool:
    """Whether a header says of a tensor what the format asks for."""
    if not isinstance(record, dict) or not isinstance(record.get("dtype"), str):
        return False
    numbers = (record.get("shape"), record.get("data_offsets"))
    whole = all(isinstance(row, list) and all(type(item) is int and item >= 0 for item in row) for row in numbers)
    return whole and len(record["data_offsets"]) == 2


def _read_safetensors_header(file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise error(
                f"{file.name} is not a safetensors file, or is cut short",
                expected="a header within the file",
                found=f"a header of {length} bytes in a file of {size}",
                where=file,
                next_step="download the file again",
            )
        try:
            header = json.loads(stream.read(length))
            problem = f"{type(header).__name__} in place of it"
        except (ValueError, RecursionError) as failure:
            header, problem = None, str(failure)
    if not isinstance(header, dict):
        raise error(
            f"the header of {file.name} is damaged",
            expected="a JSON object",
            found=problem,
            where=file,
            next_step="download the file again",
        )
    header.pop("__metadata__", None)
    entries, end = {}, 0
    for name, record in header.items():
        if not _is_tensor_record(record):
            raise error(
                f"the header of {file.name} is damaged",
                expected=f"dtype, shape and data_offsets of {name!r}",
                found=repr(record)[:120],
                where=file,
                next_step="download the file again",
            )
        dtype = SAFETENSORS_DTYPES.get(record["dtype"])
        if dtype is None:
            raise error(
                f"tensor {name!r} has the unknown dtype {record['dtype']!r}",
                expected=f"one of {', '.join(SAFETENSORS_DTYPES)}",
                found=record["dtype"],
                where=file,
                next_step="save the tensor in one of these types",
            )
        first, last = record["data_offsets"]
        entry = TensorEntry(name, dtype, tuple(record["shape"]), file, 8 + length + first)
        if last - first != entry.num_bytes:
            raise error(
                f"the header of {file.name} contradicts itself",
                expected=f"{entry.num_bytes} bytes for {name} {list(entry.shape)} {dtype}",
                found=f"{last - first} bytes",
                where=file,
                next_step="download the file again",
            )
        entries[name], end = entry, max(end, last)
    _refuse_overlaps(entries, file, error)
    if 8 + length + end != size:
        raise error(
            f"{file.name} is cut short" if 8 + length + end > size else f"{file.name} is longer than its header says",
            expected=f"{8 + length + end} bytes by its own header",
            found=f"{size} bytes",
            where=file,
            next_step="download the file again",
        )
    return entries


def _refuse_overlaps(entries: dict[str, TensorEntry], file: Path, error: type[PortingKitError]) -> None:
    """Two tensors must not share bytes: one of them would be read from the other's values."""
    previous: TensorEntry | None = None
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if previous is not None and entry.offset < previous.offset + previous.num_bytes:
            raise error(
                f"the header of {file.name} contradicts itself",
                expected="bytes of its own for every tensor",
                found=f"{previous.name} and {entry.name} overlap",
                where=file,
                next_step="download the file again",
            )
        previous = entry if entry.num_bytes else previous


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


def _read_zip_pickle(file: Path, error: type[PortingKitError]) -> dict[str, TensorEntry]:
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
