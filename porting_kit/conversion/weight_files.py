"""Which tensors a weight file holds, read from its header alone: safetensors and PyTorch's zip format.

Opening a file costs milliseconds and imports no torch, so a preflight can do it. A pointer left by git-lfs, a file cut
short, and a pickle that asks for anything but tensors are refused here, within the first read. This module does not
read values (`tensor_source` does).
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

from porting_kit.conversion.pickle_files import read_pickle_header
from porting_kit.conversion.tensor_entry import TensorEntry
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
MAX_HEADER_BYTES = 100_000_000
WEB_PAGE = re.compile(rb"\s*<(!doctype|!--|\?xml|html|head|body|error)|Entry not found", re.IGNORECASE)
"""How an answer of a server begins. A safetensors file may begin with `<` as well: a header of 60 bytes."""


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
    return read_pickle_header(file, error)


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
    _refuse_gaps(entries, 8 + length, file, error)
    if 8 + length + end != size:
        raise error(
            f"{file.name} is cut short" if 8 + length + end > size else f"{file.name} is longer than its header says",
            expected=f"{8 + length + end} bytes by its own header",
            found=f"{size} bytes",
            where=file,
            next_step="download the file again",
        )
    return entries


def _refuse_gaps(entries: dict[str, TensorEntry], start: int, file: Path, error: type[PortingKitError]) -> None:
    """Each byte from `start` on must belong to one tensor: one of two is read twice, one of none is a tensor lost.

    A damaged header that says a name twice loses a tensor so. The format forbids both (README of safetensors).
    """
    place, previous = start, "the header"
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.num_bytes and entry.offset != place:
            lost = f"{entry.offset - place} bytes between {previous} and {entry.name} belong to no tensor"
            raise error(
                f"the header of {file.name} contradicts itself",
                expected="bytes of its own for every tensor, and none between them",
                found=f"{previous} and {entry.name} overlap" if entry.offset < place else lost,
                where=file,
                next_step="download the file again",
            )
        if entry.num_bytes:
            place, previous = entry.offset + entry.num_bytes, entry.name
