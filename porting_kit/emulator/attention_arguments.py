"""The arguments of functional.gpt_attention in every release: which are read, which describe memory, which refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.emulator.attention_step import AttentionStep, pad_requests
from porting_kit.emulator.symbols import find_use_site, raise_not_emulated
from porting_kit.emulator.tree_mask import unpack_tree_mask
from porting_kit.errors import EmulatorError

READ_ARGUMENTS = frozenset(
    {
        *("qkv", "qkv_bias", "layer_idx", "num_heads", "num_kv_heads", "hidden_size_per_head", "mask_type"),
        *("q_scaling", "qk_tanh_scale", "attn_logit_softcapping_scale", "alibi_slopes", "position_embedding_type"),
        *("rotary_embedding_dim", "rotary_embedding_base", "rotary_embedding_scale_type", "rotary_embedding_scale"),
        *("rotary_embedding_short_m_scale", "rotary_embedding_long_m_scale", "rotary_embedding_max_positions"),
        *("rotary_embedding_original_max_positions", "rotary_embedding_scaling_factors", "rotary_cos_sin"),
        *("rotary_inv_freq", "long_rope_rotary_cos_sin", "long_rope_rotary_inv_freq"),
        *("spec_decoding_packed_mask", "spec_decoding_position_offsets"),
        *("medusa_packed_mask", "medusa_position_offsets"),
    }
)
# Sizes, pointers and lengths: the step knows them already.
DESCRIBING_ARGUMENTS = frozenset(
    {
        *("past_key_value", "sequence_length", "host_past_key_value_lengths", "host_max_attention_window_sizes"),
        *("host_sink_token_length", "context_lengths", "host_context_lengths", "cache_indirection"),
        *("host_request_types", "kv_cache_quant_mode", "max_context_length", "tp_size", "tp_rank", "use_cache"),
        *("kv_cache_block_offsets", "host_kv_cache_block_offsets", "host_kv_cache_pool_pointers"),
        *("kv_cache_block_pointers", "host_kv_cache_block_pointers", "host_kv_cache_pool_mapping"),
        *("layer_idx_in_cache_pool", "host_runtime_perf_knobs", "host_context_progress", "max_distance"),
        *("block_sparse_block_size", "block_sparse_homo_head_pattern", "block_sparse_num_local_blocks"),
        *("block_sparse_vertical_stride", "spec_decoding_is_generation_length_variable"),
        *("spec_decoding_max_generation_length", "spec_decoding_generation_lengths", "spec_decoding_use"),
        *("cross_qkv_length", "cross_kv_length", "cp_group", "cp_rank", "dense_context_fmha"),
    }
)
NEUTRAL_VALUES = {
    **dict.fromkeys(("vision_start", "vision_length"), -1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    "cp_size": 1,
}


@dataclass(frozen=True)
class AttentionSetting:
    """What a layer's attention does, apart from rotary embedding.

    Args:
        layer: index among this rank's layers.
        query_heads, kv_heads, head_size: H, K and D of this rank.
        scale: factor on q.k.
        softcap: bound of tanh on the logits, 0 for none.
        slopes: ALiBi slopes, float [H], None without ALiBi.
        window: tokens a query may see, itself included; None for all.
        slopes_key: equal for layers with equal slopes (every layer owns a copy of the same numbers).
    """

    layer: int
    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float
    slopes: torch.Tensor | None
    window: int | None
    slopes_key: tuple | None = None


def read_attention_setting(step: AttentionStep, arguments: dict[str, Any]) -> AttentionSetting:
    """The attention arguments of a call; refuses what is not emulated.

    An argument that this module does not know must be neutral: a name that a later release adds is never ignored.
    """
    for name, value in arguments.items():
        if name not in READ_ARGUMENTS and name not in DESCRIBING_ARGUMENTS and not is_neutral(name, value):
            raise_not_emulated(f"functional.gpt_attention({name}=...)")
    mask = arguments.get("mask_type")
    if mask is not None and mask.name != "causal":
        raise_not_emulated(f"functional.gpt_attention(mask_type={mask.name})")
    if arguments.get("qkv_bias") is not None:
        arguments["qkv"] = arguments["qkv"] + arguments["qkv_bias"]
    kind = arguments["position_embedding_type"].name
    slopes = arguments.get("alibi_slopes") if kind.startswith("alibi") else None
    D = int(arguments["hidden_size_per_head"])
    # Before 0.9 layers do not tell their index; a step calls them in order.
    layer = int(arguments["layer_idx"]) if "layer_idx" in arguments else step.count_layer()
    softcap = arguments.get("qk_tanh_scale") or arguments.get("attn_logit_softcapping_scale") or 0.0
    return AttentionSetting(
        layer=layer,
        query_heads=int(arguments["num_heads"]),
        kv_heads=int(arguments["num_kv_heads"]),
        head_size=D,
        scale=1.0 / (math.sqrt(D) * float(arguments["q_scaling"])),
        softcap=float(softcap),
        slopes=None if slopes is None else slopes.data.reshape(-1),
        window=step.cache.window(layer),
        slopes_key=None if slopes is None else ("layer", layer) if step.is_recorded else find_slopes_key(slopes),
    )


def find_slopes_key(slopes: Any) -> tuple:
    """The slopes' values, read once for each Tensor that holds them (a read would stall a GPU at every layer)."""
    key = getattr(slopes, "values_key", None)
    if key is None:
        key = slopes.values_key = (slopes.data.dtype, tuple(slopes.data.reshape(-1).tolist()))
    return key


def is_neutral(name: str, value: Any) -> bool:
    """Whether an argument that is not read leaves the result as it is."""
    if value is None or value is False:
        return True
    return name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]


def read_tree(
    step: AttentionStep, arguments: dict[str, Any], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tree of the generation requests as the model passed it on.

    Returns:
        (visibility bool [B, N, N], position offsets int64 [B, N]), or (None, None) for one token a request.

    Raises:
        EmulatorError: several tokens a request and no tree reached the attention layer.
    """
    packed = arguments.get("spec_decoding_packed_mask", arguments.get("medusa_packed_mask"))
    offsets = arguments.get("spec_decoding_position_offsets", arguments.get("medusa_position_offsets"))
    B, N = len(step.generation_lengths), max(step.generation_lengths)
    if packed is None or offsets is None:
        if N == 1:
            return None, None
        inner, outer = find_use_site()
        raise EmulatorError(
            "Only speculative decoding mode supports input length > 1 in the generation phase",
            expected="packed mask and position offsets passed on to the attention layer",
            found=f"{N} tokens a request and none of them",
            where=f"{inner}, {outer}",
            next_step="pass the speculative-decoding arguments through every level of the model",
        )

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        words = packed.data
        if words.dim() == 2:
            if words.shape[0] != step.generation_tokens:
                raise_tree_shape("packed mask", words, f"{step.generation_tokens} rows")
            words = pad_requests(step, words, step.generation_lengths)
        if words.shape[:2] != (B, N) or offsets.data.shape != (B, N):
            raise_tree_shape("tree", offsets.data, f"position offsets [{B}, {N}]")
        return unpack_tree_mask(words, N).to(device), offsets.data.to(device).long()

    return step.remember(("tree", id(packed), id(offsets), device), (packed, offsets), make)


def raise_tree_shape(what: str, found: torch.Tensor, expected: str) -> None:
    """Raise EmulatorError for a tree input whose shape does not belong to the step."""
    raise EmulatorError(
        f"the {what} does not belong to this step's requests",
        expected=expected,
        found=tuple(found.shape),
        next_step="make mask and offsets of the tree that the step's requests have",
    )


def refuse_by_kernel(step: AttentionStep, setting: AttentionSetting, arguments: dict[str, Any]) -> None:
    """Stop where the profile's kernels stop: at a generation step with a tree."""
    refuse = getattr(step.kernel, "refuse_layer", None)
    if refuse is not None:
        refuse(setting, arguments)
