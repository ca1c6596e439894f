"""fold_alibi: express ALiBi as extra rotary dims, which every kernel that rotates queries and keys computes.

The extra dims come first in the head, because rotary embedding acts on the first dims, in the NeoX order that pairs
dim t with t + P. Queries and keys get constants there through the projection's bias; the kernel's own rotation, by past
length + position offset, turns them into waves of the distance. So the bias is right in a tree too. Content dims
follow, unrotated. Values keep their dims in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.alibi_line import AlibiFit, alibi_slopes, fit_alibi
from porting_kit.kernel_fit.attention_tensors import HeadTensors, has_dense_bias, pad_dims
from porting_kit.kernel_fit.exact_transforms import Fitted, Tensors, change_layers
from porting_kit.kernel_fit.note import FitNote
from porting_kit.kernel_fit.settings import (
    ALIBI_KINDS,
    BASE_KEYS,
    DENSE_BIAS_KEY,
    QKV_BIAS_KEY,
    refuse_changed_rows,
    set_rotary_dims,
)

ERROR_BOUND_NATS = 0.025
"""Largest error of an attention logit, where keys matter, that the fit of the line itself may have."""
FEWEST_DIMS = 8
"""Four pairs."""
MOST_PAIRS = 32
"""More pairs follow the line no better than half precision lets them be seen."""


def model_slopes(config: Mapping[str, Any], content_size: int | None = None) -> np.ndarray:
    """The slopes that a model's attention logits really get, float64 [H].

    `alibi_with_scale` (Falcon) divides them by the square root of the head size
    (layers/attention.py 0.11.0.dev2024062500, alibi_scale).
    """
    slopes = alibi_slopes(config["num_attention_heads"], float(config.get("alibi_bias_max") or 8.0))
    if config["position_embedding_type"] == "alibi_with_scale":
        slopes = slopes / math.sqrt(content_size or config["head_size"])
    return slopes


def fold_alibi(
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    head_size: int,
    length_tokens: int,
    content_size: int | None = None,
) -> Fitted:
    """Turn ALiBi into rotary waves.

    Args:
        head_size: D of the fitted model; from the content's size to it there is room for the waves.
        length_tokens: the longest sequence, prompt included.
        content_size: dims of queries and keys that are in use (the first ones); all of them when None.

    Raises:
        ConversionError: no ALiBi, no room, a scaling that must be folded first, projections that are clipped, or a
            line that cannot be followed closely enough over this length.
    """
    old = config["head_size"]
    content = old if content_size is None else content_size
    require_alibi(config, head_size, content, "fold_alibi", FEWEST_DIMS)
    refuse_changed_rows(config, "fold_alibi")
    slopes = model_slopes(config)
    pairs = min((head_size - content) // 2, MOST_PAIRS)
    fit = fit_alibi(slopes, pairs, length_tokens, str(config["dtype"]))
    if fit.error_nats > ERROR_BOUND_NATS:
        raise ConversionError(
            "fold_alibi cannot follow this model's ALiBi closely enough",
            expected=f"an error of the attention logit of at most {ERROR_BOUND_NATS} nats",
            found=f"{fit.error_nats:.3g} with {pairs} pairs over {length_tokens} tokens",
            next_step="lower max_seq_len, or leave more room for pairs (a larger head size, fewer content dims)",
        )
    query_wave, key_wave = wave_biases(fit, head_size, config["num_key_value_heads"], str(config["dtype"]))
    factor = math.sqrt(head_size / old)

    def fold(prefix: str, heads: HeadTensors) -> HeadTensors:
        require_room(heads, content, prefix, "fold_alibi")
        return insert_front(heads.with_bias(), query_wave, key_wave, head_size, content, factor)

    folded = change_layers(config, tensors, fold)
    fitted = _rotary_config(config, fit, head_size, length_tokens)
    fitted[QKV_BIAS_KEY] = True
    fitted[DENSE_BIAS_KEY] = has_dense_bias(tensors)
    figures = {
        "head_size": [old, head_size],
        "content_dims": content,
        "pairs": pairs,
        "rotary_base": fit.base,
        "length_tokens": length_tokens,
        "logit_error_nats": measure_waves(fit, query_wave, key_wave, head_size),
        "fit_error_nats": fit.error_nats,
        "floor_nats": fit.floor_nats,
        "rounding_noise_nats": fit.noise_nats,
    }
    what = (
        f"ALiBi becomes {pairs} rotary pairs of base {fit.base:g} before {content} content dims, up to "
        f"{length_tokens} tokens"
    )
    return fitted, folded, FitNote("fold_alibi", False, what, figures)


def require_alibi(config: Mapping[str, Any], head_size: int, content: int, transform: str, dims: int) -> None:
    """Stop when there is no ALiBi, or no room of `dims` dims for what stands for it.

    Raises:
        ConversionError: so, or a query scaling that is not folded yet.
    """
    kind = config["position_embedding_type"]
    if kind not in ALIBI_KINDS:
        raise ConversionError(
            f"{transform} has no ALiBi to fold",
            expected="alibi or alibi_with_scale",
            found=str(kind),
            next_step="remove it from the fit",
        )
    if float(config.get("q_scaling") or 1.0) != 1.0:
        raise ConversionError(
            f"{transform} needs the query scaling folded first",
            expected="q_scaling 1",
            found=f"q_scaling {config['q_scaling']:g}",
            next_step="put fold_scale before it",
        )
    if head_size - content < dims or head_size < config["head_size"]:
        raise ConversionError(
            f"{transform} has no room in the heads",
            expected=f"at least {dims} free dims",
            found=f"{content} content dims in heads of {head_size}",
            next_step="truncate_heads makes room at the same head size",
        )


def require_room(heads: HeadTensors, content: int, prefix: str, transform: str) -> None:
    """Stop when queries or keys use dims behind their content.

    Raises:
        ConversionError: they do.
    """
    rest = [heads.query[:, content:], heads.key[:, content:]]
    if heads.has_bias:
        rest += [heads.query_bias[:, content:], heads.key_bias[:, content:]]
    if any(bool(part.any()) for part in rest):
        raise ConversionError(
            f"{prefix}attention uses dims that {transform} was told are free",
            expected=f"zeros behind the first {content} dims of queries and keys",
            found="other values",
            next_step=f"put truncate_heads before {transform}",
        )


def wave_biases(fit: AlibiFit, head_size: int, kv_heads: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the bias of queries and keys must hold in the extra dims, float32 [H, 2P] and [K, 2P].

    After rotation the product is b * (x * cos(theta d) - y * sin(theta d)) for a query (x, y) and a key (b, 0). Keys
    get powers of two, which no rounding touches; queries carry amplitude and phase.
    """
    pairs = fit.pairs
    amplitude = np.hypot(fit.cosine, fit.sine) * math.sqrt(head_size)
    largest = amplitude.reshape(kv_heads, -1, pairs).max(1)
    key = 2.0 ** np.round(np.log2(np.sqrt(np.maximum(largest, 2.0**-12))))
    per_query = np.repeat(key, len(fit.slopes) // kv_heads, axis=0)
    cosine, sine = (np.sqrt(head_size) * part / per_query for part in (fit.cosine, fit.sine))
    query = torch.from_numpy(np.concatenate([cosine, -sine], axis=1)).to(getattr(torch, dtype)).float()
    keys = np.concatenate([key, np.zeros_like(key)], axis=1)
    return query, torch.from_numpy(keys).float()


def measure_waves(fit: AlibiFit, query: torch.Tensor, key: torch.Tensor, head_size: int) -> float:
    """Largest error in nats of the line that the rounded biases give, where keys matter, constants left out."""
    pairs = fit.pairs
    per_query = key.double().repeat_interleave(len(fit.slopes) // key.shape[0], 0)[:, :pairs].numpy()
    rounded = query.double().numpy() * np.tile(per_query, 2) / math.sqrt(head_size)
    stored = replace(fit, cosine=rounded[:, :pairs], sine=-rounded[:, pairs:])
    distances = np.arange(fit.length_tokens, dtype=float)
    line = -fit.slopes[:, None] * distances
    gap = np.where(line > fit.floor_nats, stored.evaluate(distances) - line, np.nan)
    return float(((np.nanmax(gap, axis=1) - np.nanmin(gap, axis=1)) / 2).max())


def insert_front(
    heads: HeadTensors,
    query_wave: torch.Tensor,
    key_wave: torch.Tensor,
    head_size: int,
    content: int,
    factor: float,
) -> HeadTensors:
    """The extra dims in front of queries and keys, content behind; values padded at the end."""
    extra = query_wave.shape[1]
    padded = pad_dims(heads, head_size)

    def shift(tensor: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros_like(tensor)
        moved[:, extra : extra + content] = tensor[:, :content]
        return moved

    query_bias, key_bias = shift(padded.query_bias) * factor, shift(padded.key_bias)
    query_bias[:, :extra] = query_wave.to(query_bias)
    key_bias[:, :extra] = key_wave.to(key_bias)
    return replace(
        padded,
        query=shift(padded.query) * factor,
        key=shift(padded.key),
        query_bias=query_bias,
        key_bias=key_bias,
    )


def _rotary_config(config: Mapping[str, Any], fit: AlibiFit, head_size: int, length_tokens: int) -> dict[str, Any]:
    """The config of the rotary model that an ALiBi model becomes."""
    fitted = {**config, "head_size": head_size, "position_embedding_type": "rope_gpt_neox", "rotary_scaling": None}
    for key in BASE_KEYS:
        if key in config or key == "rotary_base":
            fitted[key] = fit.base
    set_rotary_dims(fitted, 2 * fit.pairs)
    fitted["max_position_embeddings"] = max(int(config.get("max_position_embeddings") or 0), length_tokens)
    return fitted
