"""Attention, and the bundles of tensors that travel to it through a model's forward.

A new kind of input (such as the tree of draft tokens) reaches attention only if each level in between has a parameter
for it and hands it on: top class -> model -> list of layers -> layer -> attention.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from .._common import default_net
from ..functional import (
    AttentionMaskType,
    PositionEmbeddingType,
    RopeEmbeddingUtils,
    RotaryScalingType,
    Tensor,
    cast,
    clip,
    generate_alibi_slopes,
    gpt_attention,
)
from ..module import Module
from ..parameter import Parameter
from ..quantization import QuantMode
from .linear import ColumnLinear, RowLinear


@dataclass
class AttentionParams:
    """The lengths of the requests of one call. Tensors named `host_*` are on the CPU; all are int32 [B]."""

    sequence_length: Any = None
    context_lengths: Any = None
    host_context_lengths: Any = None
    max_context_length: int | None = None
    host_request_types: Any = None  # 0 context, 1 generation


@dataclass
class KeyValueCacheParams:
    """The KV cache: one entry per layer, or a pool of blocks with its tables."""

    past_key_value: Any = None
    host_past_key_value_lengths: Any = None
    host_max_attention_window_sizes: Any = None
    host_sink_token_length: Any = None
    kv_cache_block_offsets: Any = None
    host_kv_cache_block_offsets: Any = None
    host_kv_cache_pool_pointers: Any = None
    cache_indirection: Any = None

    def per_layer(self, num_layers):
        """One KeyValueCacheParams a layer, each with its own entry of the cache."""
        entries = [None] * num_layers if self.past_key_value is None else self.past_key_value
        return [replace(self, past_key_value=[entry]) for entry in entries]


@dataclass
class SpecDecodingParams:
    """The tree of draft tokens of a generation request; shapes in `functional.gpt_attention`."""

    spec_decoding_generation_lengths: Any = None
    spec_decoding_position_offsets: Any = None
    spec_decoding_packed_mask: Any = None


class Attention(Module):
    """Multi-head attention: qkv projection, attention over the cache, output projection.

    Args:
        local_layer_idx: the layer's number on this rank.
        hidden_size: E.
        num_attention_heads, num_kv_heads: H and K of the whole model.
        attention_head_size: D; E / H when None.
        rotary_embedding_percentage: the share of D that is rotated, the first dims.
        q_scaling: logits are divided by q_scaling * sqrt(D).
        dense_bias: whether the output projection has a bias; like `bias` when None.
    """

    def __init__(
        self,
        *,
        local_layer_idx,
        hidden_size,
        num_attention_heads,
        num_kv_heads=None,
        max_position_embeddings=1024,
        num_layers=1,
        attention_head_size=None,
        attention_mask_type=AttentionMaskType.causal,
        bias=True,
        dtype=None,
        position_embedding_type=PositionEmbeddingType.learned_absolute,
        rotary_embedding_base=10000.0,
        rotary_embedding_scaling=None,
        rotary_embedding_percentage=1.0,
        tp_group=None,
        tp_size=1,
        tp_rank=0,
        quant_mode=QuantMode.NONE,
        q_scaling=1.0,
        dense_bias=None,
        clip_qkv=None,
        alibi_bias_max=8,
        max_attn_value=0.0,
    ):
        super().__init__()
        kv_heads = num_attention_heads if num_kv_heads is None else num_kv_heads
        self.local_layer_idx = local_layer_idx
        self.attention_head_size = attention_head_size or hidden_size // num_attention_heads
        self.num_attention_heads = num_attention_heads // tp_size
        self.num_attention_kv_heads = math.ceil(kv_heads / tp_size)  # repeated when there are fewer than ranks
        self.attention_mask_type = attention_mask_type
        self.position_embedding_type = position_embedding_type
        self.max_position_embeddings = max_position_embeddings
        self.q_scaling = q_scaling
        self.max_attn_value = max_attn_value
        self.clip_qkv = clip_qkv
        self.quant_mode = quant_mode
        self.tp_size, self.tp_rank = tp_size, tp_rank

        self.rotary_embedding_base = rotary_embedding_base
        self.rotary_embedding_scale = 1.0
        self.rotary_embedding_scale_type = RotaryScalingType.none
        if rotary_embedding_scaling is not None:
            self.rotary_embedding_scale_type = RotaryScalingType[rotary_embedding_scaling["type"]]
            self.rotary_embedding_scale = rotary_embedding_scaling["factor"]
        self.rotary_embedding_dim = 0
        if position_embedding_type.is_rope():
            self.rotary_embedding_dim = int(self.attention_head_size * rotary_embedding_percentage)
            table = RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin(
                max_position_embeddings,
                self.rotary_embedding_dim,
                rotary_embedding_base,
                self.rotary_embedding_scale,
                self.rotary_embedding_scale_type,
                rope_scaling_config=rotary_embedding_scaling,
            )
            self.register_parameter("rotary_cos_sin", Parameter(table, dtype="float32", is_buffer=True))
        elif position_embedding_type.is_alibi():
            scaled = position_embedding_type == PositionEmbeddingType.alibi_with_scale
            slopes = generate_alibi_slopes(
                num_attention_heads,
                tp_size=tp_size,
                tp_rank=tp_rank,
                alibi_scale=1.0 / math.sqrt(self.attention_head_size) if scaled else 1.0,
                alibi_bias_max=alibi_bias_max,
            )
            self.register_parameter("alibi_slopes", Parameter(slopes, dtype="float32", is_buffer=True))

        all_heads = tp_size * (self.num_attention_heads + 2 * self.num_attention_kv_heads)
        split = {"dtype": dtype, "tp_group": tp_group, "tp_size": tp_size}
        self.qkv = ColumnLinear(
            hidden_size, all_heads * self.attention_head_size, bias=bias, gather_output=False, **split
        )
        self.dense = RowLinear(
            num_attention_heads * self.attention_head_size,
            hidden_size,
            bias=bias if dense_bias is None else dense_bias,
            **split,
        )

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        use_cache=False,
        spec_decoding_params=None,
        kv_cache_params=None,
        attention_params=None,
        norm_before_bmm1=False,
        lora_layer_params=None,
    ):
        assert isinstance(hidden_states, Tensor)
        if not default_net().plugin_config.gpt_attention_plugin:
            raise NotImplementedError("the bundled definitions hold the attention plugin's path only")
        tree = SpecDecodingParams() if spec_decoding_params is None else spec_decoding_params

        qkv = self.qkv(hidden_states)
        if self.clip_qkv is not None:
            qkv = clip(qkv, -self.clip_qkv, self.clip_qkv)

        is_rope, is_alibi = self.position_embedding_type.is_rope(), self.position_embedding_type.is_alibi()
        context, past_key_value = gpt_attention(
            qkv=qkv,
            past_key_value=kv_cache_params.past_key_value[0],
            sequence_length=attention_params.sequence_length,
            host_past_key_value_lengths=kv_cache_params.host_past_key_value_lengths,
            host_max_attention_window_sizes=kv_cache_params.host_max_attention_window_sizes,
            host_sink_token_length=kv_cache_params.host_sink_token_length,
            context_lengths=attention_params.context_lengths,
            cache_indirection=kv_cache_params.cache_indirection,
            host_request_types=attention_params.host_request_types,
            layer_idx=self.local_layer_idx,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_kv_heads,
            hidden_size_per_head=self.attention_head_size,
            q_scaling=self.q_scaling,
            qk_tanh_scale=self.max_attn_value,
            rotary_embedding_dim=self.rotary_embedding_dim,
            rotary_embedding_base=self.rotary_embedding_base,
            rotary_embedding_scale_type=self.rotary_embedding_scale_type,
            rotary_embedding_scale=self.rotary_embedding_scale,
            rotary_embedding_max_positions=self.max_position_embeddings,
            position_embedding_type=self.position_embedding_type,
            rotary_cos_sin=self.rotary_cos_sin.value if is_rope else None,
            kv_cache_quant_mode=self.quant_mode,
            max_context_length=attention_params.max_context_length,
            mask_type=self.attention_mask_type,
            alibi_slopes=cast(self.alibi_slopes.value, hidden_states.dtype) if is_alibi else None,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            kv_cache_block_offsets=kv_cache_params.kv_cache_block_offsets,
            host_kv_cache_block_offsets=kv_cache_params.host_kv_cache_block_offsets,
            host_kv_cache_pool_pointers=kv_cache_params.host_kv_cache_pool_pointers,
            host_context_lengths=attention_params.host_context_lengths,
            use_cache=use_cache,
            spec_decoding_generation_lengths=tree.spec_decoding_generation_lengths,
            spec_decoding_position_offsets=tree.spec_decoding_position_offsets,
            spec_decoding_packed_mask=tree.spec_decoding_packed_mask,
        )
        output = self.dense(context)
        return (output, past_key_value) if use_cache else output
