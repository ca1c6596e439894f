"""Tensors of a GGUF file under their Hugging Face names, dequantised to float32, in Hugging Face's row order.

llama.cpp's converter changes two things that are undone here: it interleaves the query and key rows of LLaMA models,
and it stores Gemma's norm weights plus one. Needs the gguf extra (package gguf) for values, not for names and shapes.
Source: ggml-org/llama.cpp convert_hf_to_gguf.py (LlamaModel.permute, GemmaModel.modify_tensors).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from porting_kit.architectures.gguf_header import (
    PLAIN_TYPES,
    GgufHeader,
    GgufTensor,
    find_hugging_face_name,
    read_gguf_header,
)
from porting_kit.conversion.tensor_entry import TensorEntry
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import BaseModelError, EnvironmentMissing

if TYPE_CHECKING:
    import torch

RUN_VALUES = 1 << 19
"""Values that are dequantised at a time: long runs of blocks are far faster than the file's own short rows."""


class GgufSource(TensorSource):
    """A GGUF file read through the gguf package, a few MiB at a time."""

    def __init__(self, header: GgufHeader, records: dict[str, GgufTensor]) -> None:
        entries = {
            name: TensorEntry(
                name, PLAIN_TYPES.get(record.storage, "float32"), record.shape, header.where, record.offset
            )
            for name, record in records.items()
        }
        super().__init__(entries, header.where)
        self.header, self.records = header, records

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, see `read_rows`."""
        shape = self.shape(name)
        width = shape[-1] if len(shape) > 1 else 1
        return self.read_rows(name, 0, math.prod(shape) // max(width, 1), width).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows in Hugging Face's order: as stored, or float32 where the file is quantised."""
        import torch

        self.check_unchanged(self.header.where)
        values = out if out is not None else torch.empty((stop - start) * width, dtype=getattr(torch, self.dtype(name)))
        step = max(RUN_VALUES // max(width, 1), 1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values[(first - start) * width : (last - start) * width] = self._read_run(name, first, last, width)
        return values.reshape(-1, width) if values.numel() else values.reshape(stop - start, width)

    def _read_run(self, name: str, start: int, stop: int, width: int) -> torch.Tensor:
        """A run of rows, flat, undone what llama.cpp's converter changes."""
        heads = self._interleaved_heads(name)
        if heads is not None:
            total = math.prod(self.shape(name)) // width
            rows = _interleaved_rows(start, stop, total, heads)
            low, high = int(rows.min()), int(rows.max()) + 1
            values = self._dequantise(name, low * width, high * width)
            return values.reshape(-1, width)[rows - low].reshape(-1)
        values = self._dequantise(name, start * width, stop * width)
        is_shifted = self.header.architecture in ("gemma", "gemma2") and name.endswith("norm.weight")
        return values - 1 if is_shifted else values

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads whose rows the file interleaves; None for a tensor that lies as in the model."""
        if self.header.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return None
        heads = self.header.settings["llama.attention.head_count"]
        return self.header.settings.get("llama.attention.head_count_kv", heads) if ".k_proj." in name else heads

    def _dequantise(self, name: str, first: int, last: int) -> torch.Tensor:
        """Stored values [first, last), flat; quantised blocks as float32."""
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
        except ImportError:
            raise EnvironmentMissing(
                "reading a GGUF file's values needs the gguf package",
                expected="the package gguf",
                found="none",
                next_step="pip install 'porting-kit[gguf]'",
            ) from None
        import numpy
        import torch

        record = self.records[name]
        kind = GGMLQuantizationType(record.storage)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        low, high = first // block, -(-last // block)
        data = numpy.empty((high - low) * block_bytes, numpy.uint8)
        self._fill(self.header.where, memoryview(data), record.offset + low * block_bytes)
        plain = PLAIN_TYPES.get(record.storage)
        if plain not in (None, "bfloat16"):
            values = torch.from_numpy(data.view(plain))
        else:  # blocks do not know rows
            values = torch.from_numpy(dequantize(data.reshape(1, -1), kind).reshape(-1))
        values = values[first - low * block : last - low * block]
        return values.bfloat16() if plain == "bfloat16" else values


def _interleaved_rows(start: int, stop: int, total: int, heads: int) -> torch.Tensor:
    """Where rows [start, stop) of the model lie in the file.

    The file has each head's rows in (pair, half) order, the model in (half, pair).
    """
    import torch

    size = total // heads
    row = torch.arange(start, stop)
    inside = row % size
    return row - inside + inside % (size // 2) * 2 + inside // (size // 2)


def open_gguf_source(file: Path) -> GgufSource:
    """Open a GGUF file; its header alone is read.

    Raises:
        BaseModelError: see `read_gguf_header`; also a tensor this architecture should not have.
    """
    header = read_gguf_header(file)
    records, unknown = {}, []
    for tensor in header.tensors:
        name = find_hugging_face_name(header.architecture, tensor.name)
        if name is None:
            unknown.append(tensor.name)
        else:
            records[name] = tensor
    if unknown:
        raise BaseModelError(
            f"{len(unknown)} tensors of the GGUF file have no Hugging Face name",
            expected="a Hugging Face name for every tensor",
            where=file,
            items=unknown,
            next_step="use the model's Hugging Face folder",
        )
    return GgufSource(header, records)
