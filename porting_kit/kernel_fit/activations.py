"""What an unfitted model's queries and keys look like when it reads text: the input of a truncation.

Keys count by the attention they get: to second order, the divergence between two attention distributions is half the
variance of the logits' difference under attention. So the moments here are the mean of q q^T, and the mean over queries
of the keys' covariance under that query's attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.alibi import model_slopes

FEWEST_TOKENS_PER_DIM = 8
"""Calibration tokens for each dim of a head, at least; the loss still halves from 12 to 45 (measured on bloom-mini)."""
SAMPLED_SEQUENCES = 64
SAMPLED_TOKENS = 96


@dataclass(frozen=True)
class HeadMoments:
    """Second moments of one layer's queries and keys over calibration tokens.

    Args:
        query: mean of q q^T, float64 [H, D, D].
        key: mean over the queries of a group of k's covariance under attention, float64 [K, D, D].
        key_mean: float64 [K, D].
        tokens: how many tokens were seen.
    """

    query: torch.Tensor
    key: torch.Tensor
    key_mean: torch.Tensor
    tokens: int


class RecordedModel(Protocol):
    """A model whose sub-modules' outputs can be recorded (an emulated model, kernels exact)."""

    config: dict[str, Any]

    def new_cache(self, batch_size: int, capacity_tokens: int) -> Any: ...
    def prefill(self, prompts: Sequence[torch.Tensor], cache: Any, *, all_logits: bool = False) -> Any: ...
    def decode(self, tokens: torch.Tensor, cache: Any, *, position_offsets: Any, packed_mask: Any) -> Any: ...
    def record(self, names: str) -> Any: ...


def measure_activations(model: RecordedModel, prompts: Iterable[Sequence[int]]) -> dict[str, HeadMoments]:
    """Run calibration prompts through an unfitted ALiBi model and take moments of its queries and keys.

    Args:
        model: the unfitted model; prompts go through its context phase.
        prompts: token ids, in all at least FEWEST_TOKENS_PER_DIM * D; text like that which the model will meet.

    Returns:
        layer prefix (`transformer.layers.0.`) -> moments.

    Raises:
        ConversionError: too few tokens.
    """
    prompts = [list(prompt) for prompt in prompts]
    size, tokens = model.config["head_size"], sum(map(len, prompts))
    if tokens < FEWEST_TOKENS_PER_DIM * size:
        raise ConversionError(
            "too few calibration tokens to choose a basis for the heads",
            expected=f"at least {FEWEST_TOKENS_PER_DIM * size} tokens for head size {size}",
            found=f"{tokens} tokens",
            next_step="give more or longer prompts, or let the model write them (sample_prompts)",
        )
    slopes = torch.from_numpy(model_slopes(model.config))
    sums: dict[str, list[torch.Tensor]] = {}
    for prompt in prompts:
        with torch.inference_mode(), model.record("*attention.qkv") as recorded:
            model.prefill([torch.tensor(prompt)], model.new_cache(1, len(prompt)))
        for name, outputs in recorded.items():
            rows = torch.cat(list(outputs)).double().cpu().reshape(len(prompt), -1, size).transpose(0, 1)
            parts = _sum_moments(rows, model.config, slopes)
            prefix = name.removesuffix("attention.qkv")
            seen = sums.get(prefix)
            sums[prefix] = parts if seen is None else [a + b for a, b in zip(seen, parts, strict=True)]
    return {
        prefix: HeadMoments(query / tokens, key / tokens, total / tokens, tokens)
        for prefix, (query, key, total) in sums.items()
    }


def _sum_moments(rows: torch.Tensor, config: Mapping[str, Any], slopes: torch.Tensor) -> list[torch.Tensor]:
    """Sums over one prompt's S queries: q q^T [H, D, D], keys' covariances [K, D, D], keys [K, D]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = rows[:heads], rows[heads : heads + kv_heads]
    group, length = heads // kv_heads, rows.shape[1]
    shared = key.repeat_interleave(group, 0)
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    scale = math.sqrt(rows.shape[2]) * float(config.get("q_scaling") or 1.0)
    logits = query @ shared.transpose(1, 2) / scale - slopes[:, None, None] * distance
    attention = logits.masked_fill(distance < 0, -math.inf).softmax(-1)
    mean = attention @ shared
    second = (shared * attention.sum(1)[:, :, None]).transpose(1, 2) @ shared
    covariance = second - mean.transpose(1, 2) @ mean
    return [query.transpose(1, 2) @ query, covariance.unflatten(0, (kv_heads, group)).mean(1), key.sum(1)]


@torch.inference_mode()
def sample_prompts(
    model: RecordedModel,
    starts: Sequence[Sequence[int]],
    *,
    sequences: int = SAMPLED_SEQUENCES,
    length_tokens: int = SAMPLED_TOKENS,
    seed: int = 0,
) -> list[list[int]]:
    """Let the unfitted model write its own calibration text, by plain sampling.

    Args:
        model: kernels exact: without speculative decoding nothing is refused.
        starts: first tokens of the sequences, used in turn, each shorter than length_tokens.
        sequences: how many to write, as one batch.
        length_tokens: length of each, its start included.
        seed: of the sampling.
    """
    generator = torch.Generator().manual_seed(seed)
    written = [list(starts[index % len(starts)])[: length_tokens - 1] for index in range(sequences)]
    cache = model.new_cache(sequences, 2 * length_tokens)
    logits = model.prefill([torch.tensor(start) for start in written], cache).logits
    kept = torch.zeros(sequences, 1, dtype=torch.long)
    vocab_size = model.config["vocab_size"]
    for _ in range(length_tokens - min(map(len, written))):
        weights = logits.reshape(sequences, -1)[:, :vocab_size].float().softmax(-1)
        tokens = torch.multinomial(weights.cpu(), 1, generator=generator)
        for sequence, token in zip(written, tokens.flatten().tolist(), strict=True):
            sequence.append(token)
        logits = model.decode(tokens.to(logits.device), cache, position_offsets=None, packed_mask=None).logits
        cache.keep(kept)
    return [sequence[:length_tokens] for sequence in written]
