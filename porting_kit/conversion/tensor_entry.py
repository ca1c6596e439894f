"""What is known of one tensor before it is read: name, type, sizes and place in its file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight file.

    Args:
        name: dotted name.
        dtype: torch's name of the dtype ("bfloat16").
        shape: sizes.
        file: the file that holds it.
        offset: first byte of the values in the file, None when the format does not give one.
        checksum: CRC-32 of the values, None when the file does not state one for exactly these.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int | None = None
    checksum: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
