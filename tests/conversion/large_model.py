"""A large LLaMA folder of random weights, sharded as a downloaded one is; written block by block, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from porting_kit.architectures import read_base_config
from tests.conversion.rule_models import source_shapes

SEVEN_B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BLOCK_VALUES = 8 << 20


def write_large_model(folder: Path, *, shard_bytes: int = 2 << 30, **changes: Any) -> int:
    """Write config.json, bfloat16 shards and their index.

    Args:
        shard_bytes: a new shard begins when one would grow beyond this.
        changes: of the 7B config, such as num_hidden_layers.

    Returns:
        Bytes of all tensors.
    """
    folder.mkdir(parents=True)
    raw = {**SEVEN_B, **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = source_shapes(read_base_config(raw))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size + 2 * math.prod(shape) > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    generator = np.random.default_rng(0)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(file, shard, generator)
        weight_map |= {name: file.name for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(2 * math.prod(shape) for shape in shapes.values())


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]], generator: np.random.Generator) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [end, end + 2 * math.prod(shape)],
        }
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0
            left = math.prod(shape)
            while left:
                count = min(left, BLOCK_VALUES)
                stream.write(_random_bfloat16(generator, count, scale, is_norm="norm" in name))
                left -= count
        os.fsync(stream.fileno())  # so that no timing that follows waits for it


def _random_bfloat16(generator: np.random.Generator, count: int, scale: float, *, is_norm: bool) -> bytes:
    """Uniform in +-sqrt(3) * scale (so that products keep their size); norm weights are near one."""
    values = generator.random(count, dtype=np.float32)
    values = values * 0.2 + 0.9 if is_norm else (values * 2 - 1) * np.float32(math.sqrt(3) * scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
