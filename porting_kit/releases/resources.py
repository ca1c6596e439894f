"""What a port takes: KV cache, device memory and disk, estimated from sizes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from porting_kit.releases.kernels import GateResult

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
LOGITS_BYTES = 4  # logits_dtype is float32 in every converter
GIB = 1024**3


def count_parameters(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of all tensors with these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def kv_bytes_per_token(
    *, num_layers: int, kv_heads: int, head_size: int, cache_dtype: str, tp_size: int = 1, pp_size: int = 1
) -> int:
    """Bytes that one token of one sequence takes in the KV cache of one rank.

    Key/value heads fewer than the ranks are replicated, one a rank. `head_size` is the one the engine has: padding
    64 to 128 doubles the cache.
    """
    heads = max(1, kv_heads // tp_size)
    layers = -(-num_layers // pp_size)
    return 2 * layers * heads * head_size * DTYPE_BYTES[cache_dtype]


@dataclass(frozen=True)
class MemoryEstimate:
    """Device memory of one rank, in bytes.

    Args:
        weights: base and heads.
        kv_cache: every sequence at its full length, tree tokens included, in whole blocks.
        logits: base and Medusa logits of one step.
        activations: rough: the largest hidden and MLP buffers of one step, twice.
    """

    weights: int
    kv_cache: int
    logits: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.kv_cache + self.logits + self.activations


def estimate_memory(
    *,
    parameters: int,
    dtype: str,
    kv_token_bytes: int,
    max_batch_size: int,
    max_seq_len: int,
    num_nodes: int,
    num_heads: int,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    max_num_tokens: int,
    tokens_per_block: int | None = 64,
    tp_size: int = 1,
    pp_size: int = 1,
) -> MemoryEstimate:
    """Estimate the device memory of one rank.

    Args:
        parameters: elements of base and heads together.
        kv_token_bytes: from `kv_bytes_per_token`.
        num_nodes: N; all N tokens of a step are written behind the past before the accepted ones are kept.
        num_heads: M.
        (the others as in the port file and the base config)
    """
    tokens = max_seq_len + num_nodes
    if tokens_per_block:
        tokens = -(-tokens // tokens_per_block) * tokens_per_block
    rows = max_batch_size * num_nodes
    width = max(hidden_size, intermediate_size // tp_size)
    return MemoryEstimate(
        weights=parameters * DTYPE_BYTES[dtype] // (tp_size * pp_size),
        kv_cache=max_batch_size * tokens * kv_token_bytes,
        logits=(1 + num_heads) * rows * vocab_size * LOGITS_BYTES,
        activations=2 * max_num_tokens * (hidden_size + width) * DTYPE_BYTES[dtype],
    )


def memory_gate(estimate: MemoryEstimate, *, card_bytes: int | None) -> GateResult:
    """Whether the estimate fits the card; a pass with the figures when the card's memory is not known."""
    parts = (
        f"weights {estimate.weights / GIB:.2f}, KV cache {estimate.kv_cache / GIB:.2f}, "
        f"logits {estimate.logits / GIB:.2f}, activations {estimate.activations / GIB:.2f} GiB"
    )
    value = f"{estimate.total / GIB:.2f} GiB a rank ({parts})"
    expected = "card not known" if card_bytes is None else f"at most {card_bytes / GIB:.2f} GiB"
    if card_bytes is None or estimate.total <= card_bytes:
        return GateResult("device memory", value, "pass", expected, source="estimate from sizes")
    return GateResult(
        "device memory",
        value,
        "refused",
        expected,
        effect="the engine or its KV cache does not fit",
        remedy="fewer or shorter sequences, more ranks, or an 8-bit KV cache",
        source="estimate from sizes",
    )


def disk_gate(*, weight_bytes: int, free_bytes: int) -> GateResult:
    """Whether checkpoint and engine fit: each is about as large as the weights, plus a tenth."""
    need = int(2.1 * weight_bytes)
    value = f"{free_bytes / GIB:.2f} GiB free"
    expected = f"{need / GIB:.2f} GiB (checkpoint and engine)"
    if free_bytes >= need:
        return GateResult("disk", value, "pass", expected, source="estimate from sizes")
    return GateResult(
        "disk",
        value,
        "refused",
        expected,
        effect="the conversion or the build stops half-way",
        remedy="free room, or choose another run folder",
        source="estimate from sizes",
    )
