"""The steps a plan is made of, what each does to the attention's shape, and what it changes in the model's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from porting_kit.kernel_fit.settings import (
    DIGIT_BASE,
    LARGEST_DIGIT,
    POSITION_DIMS,
    WRITING_DTYPES,
    next_power_of_two,
)
from porting_kit.releases.kernels import KernelProfile
from porting_kit.releases.shape import AttentionShape

ORDER = ("fold_scale", "truncate_heads", "write_positions", "fold_alibi", "pad_head_size", "pad_query_groups")
"""All transforms, in the order they are applied."""
APPROXIMATE = frozenset({"truncate_heads", "fold_alibi"})
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "fold_scale": ("q_scaling",),
    "truncate_heads": (),
    "write_positions": (
        "attention_head_size",
        "position_embedding_type",
        "max_position_embeddings",
        "bias",
        "dense_bias",
    ),
    "fold_alibi": (
        "attention_head_size",
        "position_embedding_type",
        "max_position_embeddings",
        "rotary_embedding_percentage",
        "rotary_embedding_base",
        "bias",
        "dense_bias",
    ),
    "pad_head_size": ("attention_head_size", "rotary_embedding_percentage"),
    "pad_query_groups": ("attention_head_size",),
}
"""Arguments of the attention layer that a transform changes: the patched source takes them from the config."""
FEWEST_PAIRS = 8
"""Rotary pairs that follow ALiBi within the bound at every length of the range, with half-precision noise in reason."""
SHORT_TOKENS, FEWEST_SHORT_PAIRS = 1024, 6
"""Where a truncation must make the room, every pair costs two dims of content. Up to this length six pairs follow the
line within 0.013 nats in float16 and 0.023 in bfloat16 (measured for 16 to 112 heads; 0.021 in float16 at 2,048 tokens,
too near the bound). On a trained model 116 kept dims are closer to the original than 112: the largest margin is 0.09
instead of 0.41 logits in float16."""
LONGEST_TOKENS = {"fold_alibi": 8192, "write_positions": DIGIT_BASE * LARGEST_DIGIT}
"""The longest sequence of each transform that stands for ALiBi: what has been measured, what two digits hold."""
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class FitStep:
    """One transform with its arguments, as `apply_fit` passes them."""

    name: str
    arguments: Mapping[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ", ".join(f"{key} {value:g}" for key, value in self.arguments.items())
        return f"{self.name} ({values})" if values else self.name


def apply_to_shape(shape: AttentionShape, steps: Sequence[FitStep]) -> AttentionShape:
    """The attention's shape after the steps."""
    for step in steps:
        match step.name:
            case "fold_scale":
                shape = replace(shape, q_scaling=1.0)
            case "fold_alibi":
                shape = replace(shape, head_size=step.arguments["head_size"], position_kind="rope_gpt_neox")
            case "write_positions":
                size = step.arguments["head_size"]
                shape = replace(shape, head_size=size, position_kind="learned_absolute", positions_in_graph=True)
            case "pad_head_size":
                shape = replace(shape, head_size=step.arguments["head_size"])
            case "pad_query_groups":
                group = shape.query_heads // shape.kv_heads
                shape = replace(shape, query_heads=shape.kv_heads * next_power_of_two(group))
    return shape


def kernel_sizes(profile: KernelProfile, shape: AttentionShape) -> list[int]:
    """Head sizes that could have a kernel: the compiled ones, and powers of two from the head's own size on."""
    if profile.limits is None:
        return [next_power_of_two(shape.head_size), 2 * next_power_of_two(shape.head_size)]
    sizes = {kernels.head_size for kernels in profile.limits.compiled}
    return sorted(size for size in sizes if size >= shape.head_size)


def plan_length(shape: AttentionShape, config: Mapping[str, Any]) -> int:
    """The longest sequence a fit must reach, in tokens."""
    return int(shape.max_seq_len or config.get("max_position_embeddings") or 2048)


def find_obstacle(name: str, shape: AttentionShape, config: Mapping[str, Any]) -> str | None:
    """Why a transform that stands for ALiBi cannot be used with this type, cache and ranks, None when it can."""
    if shape.cache_dtype in ("int8", "fp8"):
        return f"a {shape.cache_dtype} cache rounds the keys' extra dims far beyond the bound on the attention logit"
    if name == "write_positions" and shape.dtype not in WRITING_DTYPES:
        return f"its products must be summed in float32, which the context kernels do not always do for {shape.dtype}"
    if name == "write_positions" and int((config.get("mapping") or {}).get("pp_size") or 1) > 1:
        return "pipeline ranks after the first are fed no position_ids, from which positions are written"
    return None


def kept_dims(name: str, shape: AttentionShape, config: Mapping[str, Any]) -> int:
    """How many dims of queries and keys a truncation keeps: all but those that what stands for ALiBi takes.

    Args:
        name: `fold_alibi` (pairs by length) or `write_positions`.
    """
    if name == "write_positions":
        return shape.head_size - POSITION_DIMS
    pairs = FEWEST_SHORT_PAIRS if plan_length(shape, config) <= SHORT_TOKENS else FEWEST_PAIRS
    return shape.head_size - 2 * pairs


def changed_rows(config: Mapping[str, Any]) -> str | None:
    """What happens to queries and keys between projection and kernel, None when nothing does."""
    if config.get("clip_qkv") is not None:
        return f"the model clips its projections (clip_qkv {config['clip_qkv']:g})"
    if config.get("qk_layernorm"):
        return "the model normalises queries and keys (qk_layernorm)"
    return None
