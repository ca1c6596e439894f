"""Attention written as loops over requests, heads and tokens, in float64: the reference for gpt_attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from porting_kit.emulator.attention import gpt_attention
from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.network import Network
from porting_kit.emulator.tensor_type import Tensor


@dataclass
class Layer:
    """One attention layer's settings, in the words of gpt_attention's arguments."""

    H: int = 4
    K: int = 2
    D: int = 8
    kind: str = "rope_gpt_neox"
    rotary_dim: int = 8
    base: float = 10000.0
    scale_type: str = "none"
    scale: float = 1.0
    max_positions: int = 1024
    q_scaling: float = 1.0
    softcap: float = 0.0
    slopes: Sequence[float] | None = None
    window: int | None = None
    extra: dict = field(default_factory=dict)

    def arguments(self) -> dict:
        """Keyword arguments of gpt_attention, apart from qkv and the tree."""
        slopes = None if self.slopes is None else Tensor(torch.tensor(self.slopes).view(1, -1, 1, 1))
        return {
            "layer_idx": 0,
            "num_heads": self.H,
            "num_kv_heads": self.K,
            "hidden_size_per_head": self.D,
            "q_scaling": self.q_scaling,
            "qk_tanh_scale": self.softcap,
            "rotary_embedding_dim": self.rotary_dim if self.kind.startswith(("rope", "long")) else 0,
            "rotary_embedding_base": self.base,
            "rotary_embedding_scale_type": SimpleNamespace(name=self.scale_type),
            "rotary_embedding_scale": self.scale,
            "rotary_embedding_max_positions": self.max_positions,
            "position_embedding_type": SimpleNamespace(name=self.kind),
            "mask_type": SimpleNamespace(name="causal"),
            "alibi_slopes": slopes,
            **self.extra,
        }


def call_attention(layer: Layer, step: AttentionStep, qkv: torch.Tensor, **tree: torch.Tensor) -> torch.Tensor:
    """gpt_attention over packed rows, [T, H * D]."""
    network = Network()
    with network.run(step):
        arguments = layer.arguments() | {name: Tensor(value) for name, value in tree.items()}
        return gpt_attention(qkv=Tensor(qkv), **arguments)[0].data


class NaiveCache:
    """Per request: a list of (key [K, D], value [K, D], position)."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = [[] for _ in range(batch)]


def rotate_naive(vector: torch.Tensor, position: int, layer: Layer, length: int) -> torch.Tensor:
    """Rotary embedding of one head's vector, [D]."""
    if not layer.kind.startswith("rope"):
        return vector
    half = layer.rotary_dim // 2
    result = vector.clone()
    base = layer.base
    if layer.scale_type == "dynamic" and length > layer.max_positions:
        growth = layer.scale * length / layer.max_positions - (layer.scale - 1)
        base = base * growth ** (layer.rotary_dim / (layer.rotary_dim - 2))
    for index in range(half):
        angle = position * base ** (-2 * index / layer.rotary_dim)
        if layer.scale_type == "linear":
            angle /= layer.scale
        first, second = (index, index + half) if layer.kind == "rope_gpt_neox" else (2 * index, 2 * index + 1)
        a, b = vector[first].item(), vector[second].item()
        result[first] = a * math.cos(angle) - b * math.sin(angle)
        result[second] = b * math.cos(angle) + a * math.sin(angle)
    return result


def attend_naive(
    layer: Layer,
    cache: NaiveCache,
    request: int,
    qkv: torch.Tensor,
    offsets: Sequence[int],
    visible: torch.Tensor,
) -> torch.Tensor:
    """One request's new tokens over its cache, [n, H * D]; the new rows are appended to the cache.

    Args:
        qkv: [n, (H + 2K) * D].
        offsets: position of each new token behind the past.
        visible: bool [n, n], which of the new tokens a new token sees.
    """
    H, K, D = layer.H, layer.K, layer.D
    heads = qkv.double().view(-1, H + 2 * K, D)
    past = cache.rows[request]
    first = len(past)
    length = first + len(offsets)
    for token, offset in enumerate(offsets):
        keys = torch.stack([rotate_naive(heads[token, H + head], first + offset, layer, length) for head in range(K)])
        past.append((keys, heads[token, H + K :], first + offset))
    output = torch.zeros(len(offsets), H, D, dtype=torch.float64)
    for token, offset in enumerate(offsets):
        position = first + offset
        for head in range(H):
            query = rotate_naive(heads[token, head], position, layer, length)
            logits, values = [], []
            for row, (key, value, key_position) in enumerate(past):
                if row >= first and not visible[token, row - first]:
                    continue
                if layer.window is not None and position - key_position >= layer.window:
                    continue
                logit = float(query @ key[head * K // H]) / (math.sqrt(D) * layer.q_scaling)
                if layer.softcap:
                    logit = layer.softcap * math.tanh(logit / layer.softcap)
                if layer.slopes is not None:
                    logit += layer.slopes[head] * (key_position - position)
                logits.append(logit)
                values.append(value[head * K // H])
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            output[token, head] = (weights[:, None] * torch.stack(values)).sum(0)
    return output.reshape(len(offsets), H * D)


def chain(length: int) -> torch.Tensor:
    """Causal visibility, bool [n, n]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., N, N] into int32 words [..., N, W]."""
    N = visible.shape[-1]
    words = -(-N // 32)
    padded = torch.zeros(*visible.shape[:-1], words * 32, dtype=torch.int64)
    padded[..., :N] = visible.long()
    packed = (padded.unflatten(-1, (words, 32)) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def draft_tree(parents: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """(visibility bool [N, N], depth of each node) of a tree given by each node's parent (-1 for the root)."""
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            visible[node, ancestor] = True
            ancestor = parents[ancestor]
    return visible, [int(row.sum()) - 1 for row in visible]


def new_cache(layer: Layer, batch: int) -> KVCache:
    """An emulator cache with the layer's window."""
    return KVCache(batch, 128, attention_window=layer.window)
