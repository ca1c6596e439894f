"""The attention tensors of one layer, cut into heads and put together again.

A checkpoint holds queries, keys and values fused, rows Q; K; V, and the output projection with one column per head
and dim. Transforms see them by head. Everything is whole (not split over ranks) and in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.errors import CheckpointError

QKV_WEIGHT = "attention.qkv.weight"
QKV_BIAS = "attention.qkv.bias"
DENSE_WEIGHT = "attention.dense.weight"
DENSE_BIAS = "attention.dense.bias"
FITTED_SUFFIXES = (QKV_WEIGHT, QKV_BIAS, DENSE_WEIGHT)
"""Tensors that a transform may change, by the end of their names."""


@dataclass(frozen=True)
class HeadTensors:
    """One layer's projections by head.

    Args:
        query: [H, D, E]; key, value: [K, D, E]; dense: [E, H, D].
        query_bias: [H, D]; key_bias, value_bias: [K, D]; None without biases.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dense: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None

    @property
    def has_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.query_bias is not None

    def with_bias(self) -> HeadTensors:
        """The same with biases, zeros where there were none."""
        if self.has_bias:
            return self
        zeros = {
            name: getattr(self, name).new_zeros(getattr(self, name).shape[:2]) for name in ("query", "key", "value")
        }
        return replace(self, **{f"{name}_bias": zero for name, zero in zeros.items()})


def attention_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """`transformer.layers.3.` for every layer that has fused projections, in the order of names."""
    return tuple(name.removesuffix(QKV_WEIGHT) for name in names if name.endswith(QKV_WEIGHT))


def split_heads(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], prefix: str) -> HeadTensors:
    """Cut one layer's tensors into heads.

    Args:
        config: checkpoint config: head_size, num_attention_heads, num_key_value_heads, hidden_size.
        tensors: the layer's tensors among others.
        prefix: what comes before `attention.`.

    Raises:
        CheckpointError: shapes that contradict the config.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, hidden = config["head_size"], config["hidden_size"]
    rows = (heads + 2 * kv_heads) * size
    weight, dense = tensors[prefix + QKV_WEIGHT], tensors[prefix + DENSE_WEIGHT]
    for name, tensor, shape in ((QKV_WEIGHT, weight, (rows, hidden)), (DENSE_WEIGHT, dense, (hidden, heads * size))):
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{prefix}{name} has another shape than the config says",
                expected=f"{list(shape)} for {heads} query heads, {kv_heads} key/value heads, head size {size}",
                found=list(tensor.shape),
                next_step="config and weights are of different models: convert again",
            )
    query, key, value = (
        part.unflatten(0, (-1, size)) for part in weight.split([heads * size, kv_heads * size, kv_heads * size])
    )
    split = HeadTensors(query, key, value, dense.unflatten(1, (heads, size)))
    bias = tensors.get(prefix + QKV_BIAS)
    if bias is None:
        return split
    parts = [part.unflatten(0, (-1, size)) for part in bias.split([heads * size, kv_heads * size, kv_heads * size])]
    return replace(split, query_bias=parts[0], key_bias=parts[1], value_bias=parts[2])


def join_heads(heads: HeadTensors, prefix: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of one layer from its heads."""
    joined = {
        prefix + QKV_WEIGHT: torch.cat([part.flatten(0, 1) for part in (heads.query, heads.key, heads.value)]),
        prefix + DENSE_WEIGHT: heads.dense.flatten(1, 2).contiguous(),
    }
    if heads.has_bias:
        biases = (heads.query_bias, heads.key_bias, heads.value_bias)
        joined[prefix + QKV_BIAS] = torch.cat([part.flatten() for part in biases])
    return joined


def has_dense_bias(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every layer's output projection has a bias."""
    found = [prefix + DENSE_BIAS in tensors for prefix in attention_prefixes(tensors)]
    return bool(found) and all(found)


def pad_dims(heads: HeadTensors, size: int) -> HeadTensors:
    """Zero dims at the end of every head, up to `size`."""
    extra = size - heads.query.shape[1]
    padded = {
        name: torch.nn.functional.pad(getattr(heads, name), (0, 0, 0, extra)) for name in ("query", "key", "value")
    }
    if heads.has_bias:
        for name in ("query_bias", "key_bias", "value_bias"):
            padded[name] = torch.nn.functional.pad(getattr(heads, name), (0, extra))
    return replace(heads, dense=torch.nn.functional.pad(heads.dense, (0, extra)), **padded)


def scale_queries(heads: HeadTensors, factor: float) -> HeadTensors:
    """Queries times a factor, bias included."""
    bias = heads.query_bias * factor if heads.has_bias else None
    return replace(heads, query=heads.query * factor, query_bias=bias)
