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
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.weight_files import TensorEntry
from porting_kit.errors import BaseModelError, EnvironmentMissing

if TYPE_CHECKING:
    import numpy
    import torch

RUN_BLOCKS = 16384


class GgufSource(TensorSource):
    """A GGUF file read through the gguf package."""

    def __init__(self, header: GgufHeader, records: dict[str, GgufTensor]) -> None:
        entries = {
            name: TensorEntry(name, PLAIN_TYPES.get(record.storage, "float32"), record.shape, header.where)
            for name, record in records.items()
        }
        super().__init__(entries, header.where)
        self.header, self.records = header, records

    def read(self, name: str) -> torch.Tensor:
        """The values in Hugging Face's order: as stored, or float32 where the file is quantised."""
        import torch

        data = self._dequantise(self.records[name])
        tensor = torch.from_numpy(data).reshape(self.shape(name))
        if self.dtype(name) == "bfloat16":
            tensor = tensor.bfloat16()
        architecture = self.header.architecture
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = self.header.settings["llama.attention.head_count"]
            if ".k_proj." in name:
                heads = self.header.settings.get("llama.attention.head_count_kv", heads)
            return _undo_interleaving(tensor, heads)
        if architecture in ("gemma", "gemma2") and name.endswith("norm.weight"):
            return tensor - 1
        return tensor

    def _dequantise(self, record: GgufTensor) -> numpy.ndarray:
        """The stored values; quantised blocks as float32."""
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
        except ImportError:
            raise EnvironmentMissing(
                "reading a GGUF file's values needs the gguf package",
                next_step="pip install 'porting-kit[gguf]'",
            ) from None
        import numpy

        kind = GGMLQuantizationType(record.storage)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = math.prod(record.shape) // block
        data = numpy.frombuffer(self._map(self.header.where), numpy.uint8, blocks * block_bytes, offset=record.offset)
        plain = PLAIN_TYPES.get(record.storage)
        if plain not in (None, "bfloat16"):
            return data.view(plain).reshape(record.shape)
        # blocks do not know rows: long runs of blocks are far faster than the file's own short rows
        runs = [data[k : k + RUN_BLOCKS * block_bytes] for k in range(0, data.size, RUN_BLOCKS * block_bytes)]
        values = [dequantize(run.reshape(1, -1), kind).reshape(-1) for run in runs]
        return numpy.concatenate(values).reshape(record.shape)


def _undo_interleaving(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): [.., D/2, 2, ..] to [.., 2, D/2, ..]."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


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
            where=file,
            items=unknown,
            next_step="use the model's Hugging Face folder",
        )
    return GgufSource(header, records)
