"""Attention distributions of an emulated model's layers, and how far those of a fitted one are from them."""

from __future__ import annotations

import math
from typing import Any

import torch

from porting_kit.kernel_fit.alibi import model_slopes
from porting_kit.kernel_fit.alibi_line import frequencies
from porting_kit.kernel_fit.fit import CONFIG_KEY
from porting_kit.kernel_fit.settings import DIGIT_BASE, POSITION_DIMS


def compare_attention(exact: list[torch.Tensor], model: Any, texts: list[list[int]]) -> dict[str, float]:
    """Total variation between the attention distributions of all layers, heads and queries.

    Args:
        exact: what `read_attention` gave for the exact model.
        model: the model to compare with it.
        texts: the same texts.
    """
    pairs = zip(exact, read_attention(model, texts), strict=True)
    found = torch.cat([0.5 * (a - b).abs().sum(-1).flatten() for a, b in pairs])
    return {"total_variation_mean": float(found.mean()), "total_variation_worst": float(found.max())}


def read_attention(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """Attention distributions of every text and layer, float64 [H, S, S] each."""
    return [weights for text in texts for weights in attention_weights(model, text)]


@torch.inference_mode()
def attention_weights(model: Any, tokens: list[int], *, keep_bias: bool = True) -> list[torch.Tensor]:
    """Each layer's attention distributions on a text, float64 [H, S, S], from what its projections put out.

    Without the bias they are what a kernel computes that never receives ALiBi's slopes.
    """
    config, S = model.config, len(tokens)
    H, K, D = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_size"))
    position = torch.arange(S)
    distance = position[:, None] - position
    weights = []
    with model.record("*attention.qkv") as recorded:
        model.prefill([torch.tensor(tokens)], model.new_cache(1, S))
    for outputs in recorded.values():
        heads = torch.cat(list(outputs)).double().cpu().reshape(S, H + 2 * K, D).transpose(0, 1)
        query, key = heads[:H], heads[H : H + K].repeat_interleave(H // K, 0)
        bias = torch.zeros(H, S, S, dtype=torch.float64)
        if not keep_bias:
            pass
        elif config["position_embedding_type"].startswith("alibi"):
            bias = -torch.from_numpy(model_slopes(config))[:, None, None] * distance
        elif config["position_embedding_type"] == "learned_absolute":
            # The graph writes the digits behind the projection, where nothing is recorded.
            digits = torch.stack((position // DIGIT_BASE, position % DIGIT_BASE) * 2, dim=-1)
            key = torch.cat((digits.double().expand(H, -1, -1), key[..., POSITION_DIMS:]), -1)
        else:
            pairs = config[CONFIG_KEY]["notes"][-1]["figures"]["pairs"]
            angle = position[:, None] * torch.from_numpy(frequencies(float(config["rotary_base"]), pairs))
            query, key = (rotate_front(part, angle) for part in (query, key))
        logits = query @ key.transpose(1, 2) / math.sqrt(D) + bias
        weights.append(logits.masked_fill(distance < 0, -math.inf).softmax(-1))
    return weights


def rotate_front(heads: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2P dims of [H, S, D] by angles [S, P], dim t with t + P."""
    pairs = angle.shape[1]
    first, second, rest = heads.split((pairs, pairs, heads.shape[-1] - 2 * pairs), -1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest)
    return torch.cat(turned, -1)
