"""A GGUF file's header: its settings as a Hugging Face config, its tensors under Hugging Face names.

Only the header is read (a few milliseconds, no torch, no gguf package). Known are the architectures whose tensors lead
back to Hugging Face exactly; others are refused by name. Format: ggml-org/ggml docs/gguf.md, versions 2 and 3. Names
and row orders: ggml-org/llama.cpp convert_hf_to_gguf.py and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from porting_kit.errors import BaseModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
PLAIN_TYPES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}

# general.architecture -> (model_type, class name)
GGUF_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
}
CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA2_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its name in the file, shape as torch has it, storage type number, first byte in the file."""

    name: str
    shape: tuple[int, ...]
    storage: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Settings (arrays are kept as their length) and tensors of one file."""

    settings: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    where: Path

    @property
    def architecture(self) -> str:
        """`general.architecture`; BaseModelError when it is not a known one."""
        name = self.settings.get("general.architecture")
        if name not in GGUF_ARCHITECTURES:
            raise BaseModelError(
                f"a GGUF file of architecture {name!r} cannot be read back exactly",
                expected=f"one of {sorted(GGUF_ARCHITECTURES)}",
                found=repr(name),
                where=self.where,
                next_step="use the model's Hugging Face folder",
            )
        return name


def read_gguf_header(file: Path) -> GgufHeader:
    """Read settings and tensor list.

    Raises:
        BaseModelError: no GGUF file, a version this reader does not know, or a file cut short.
    """
    if not file.is_file():
        raise BaseModelError(
            "the GGUF file does not exist",
            expected="a .gguf file",
            found="no such file",
            where=file,
            next_step="correct base in the port file, or fetch the file",
        )
    status = file.stat()
    return _read_header(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_header(file: Path, size: int, changed_ns: int) -> GgufHeader:
    """Cached by size and time of change: config and tensors come from the same header."""
    with file.open("rb") as stream:
        start = stream.read(24)
        if start[:4] != b"GGUF":
            pointer = start.startswith(b"version https://git-lfs")
            raise BaseModelError(
                f"{file.name} is a pointer, not weights" if pointer else f"{file.name} is not a GGUF file",
                expected="the four letters GGUF at its beginning",
                found="a git-lfs pointer" if pointer else repr(start[:4]),
                where=file,
                next_step="fetch the large files (`git lfs pull`)"
                if pointer
                else "name a .gguf file, or download it again",
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, 4)
            try:
                version, num_tensors, num_settings = cursor.take("<IQQ")
                if version not in (2, 3):
                    raise BaseModelError(
                        f"{file.name} is GGUF version {version}",
                        expected="2 or 3",
                        found=version,
                        where=file,
                        next_step="use the model's Hugging Face folder, or convert it with a current llama.cpp",
                    )
                settings = dict(cursor.take_setting() for _ in range(num_settings))
                records = [cursor.take_record() for _ in range(num_tensors)]
            except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as problem:
                raise BaseModelError(
                    f"the header of {file.name} is damaged or cut short",
                    expected="settings and tensors as the header counts them",
                    found=repr(problem),
                    where=file,
                    next_step="download the file again",
                ) from None
            alignment = settings.get("general.alignment", 32)
            first = -(-cursor.position // alignment) * alignment
    tensors = tuple(GgufTensor(name, shape, storage, first + offset) for name, shape, storage, offset in records)
    if tensors and max(tensor.offset for tensor in tensors) >= size:
        raise BaseModelError(
            f"{file.name} is cut short",
            expected="every tensor within the file",
            found=f"a file of {size} bytes",
            where=file,
            next_step="download the file again",
        )
    return GgufHeader(settings, tensors, file)


class _Cursor:
    """Walks through the bytes of a header."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def take_string(self) -> str:
        (length,) = self.take("<Q")
        text = self.data[self.position : self.position + length]
        if len(text) != length:
            raise struct.error("string cut short")
        self.position += length
        return text.decode()

    def skip_array(self, element: int, count: int) -> None:
        if element == _ARRAY:
            raise KeyError("arrays of arrays")
        if element != _STRING:
            self.position += count * struct.calcsize("<" + _SCALARS[element])
            return
        data, position = self.data, self.position
        for _ in range(count):  # a vocabulary: a hundred thousand short strings
            position += 8 + int.from_bytes(data[position : position + 8], "little")
        self.position = position

    def take_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.take_string()
        if kind == _ARRAY:
            element, count = self.take("<IQ")
            self.skip_array(element, count)
            return count
        return self.take("<" + _SCALARS[kind])[0]

    def take_setting(self) -> tuple[str, Any]:
        name = self.take_string()
        (kind,) = self.take("<I")
        return name, self.take_value(kind)

    def take_record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.take_string()
        (dims,) = self.take("<I")
        shape = self.take(f"<{dims}Q")
        storage, offset = self.take("<IQ")
        return name, tuple(reversed(shape)), storage, offset


def read_gguf_config(file: Path) -> dict[str, Any]:
    """The file's settings as a Hugging Face config.

    Raises:
        BaseModelError: see `read_gguf_header`; also rotary frequencies that no setting describes.
    """
    header = read_gguf_header(file)
    name = header.architecture
    model_type, class_name = GGUF_ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [class_name]}
    for key, target in CONFIG_KEYS.items():
        value = header.settings.get(f"{name}.{key}")
        if value is not None:
            config[target] = value
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "rope_freqs.weight" in tensors:
        raise BaseModelError(
            "the GGUF file holds rotary frequencies as numbers, without the settings they came from",
            expected="rope scaling by its settings",
            found="the tensor rope_freqs.weight",
            where=f"{file}: rope_freqs.weight",
            next_step="use the model's Hugging Face folder, whose config states the rope scaling",
        )
    scaling = header.settings.get(f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        factor = header.settings.get(f"{name}.rope.scaling.factor")
        config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if name == "gemma2":
        # llama.cpp divides by sqrt(D) and knows no other scale for this size of model
        config["query_pre_attn_scalar"] = config["head_dim"]
    return config


def find_hugging_face_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a tensor, None when this architecture has no such tensor."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTER_NAMES:
        return f"{OUTER_NAMES[parts[0]]}.{parts[1]}"
    table = LAYER_NAMES | GEMMA2_NAMES if architecture == "gemma2" else LAYER_NAMES
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in table:
        return f"model.layers.{parts[1]}.{table[parts[2]]}.{parts[3]}"
    return None
