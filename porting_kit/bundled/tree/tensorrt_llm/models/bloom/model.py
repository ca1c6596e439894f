"""Bloom. Its forward methods do not know the speculative-decoding parameters; the patch adds them."""

from ..._utils import pad_vocab_size
from ...functional import Tensor
from ...layers import MLP, Attention, AttentionMaskType, ColumnLinear, Embedding, LayerNorm, PositionEmbeddingType
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM, PretrainedConfig


class BloomDecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); all linear layers have biases."""

    def __init__(self, config: PretrainedConfig, layer_idx: int):
        super().__init__()
        parallel = {"tp_group": config.mapping.tp_group, "tp_size": config.mapping.tp_size}
        norm = {"normalized_shape": config.hidden_size, "eps": config.norm_epsilon, "dtype": config.dtype}
        self.input_layernorm = LayerNorm(**norm)
        self.attention = Attention(
            local_layer_idx=layer_idx - config.mapping.pp_layers(config.num_hidden_layers)[0],
            hidden_size=config.hidden_size,
            attention_head_size=config.head_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            num_layers=config.num_hidden_layers,
            dtype=config.dtype,
            attention_mask_type=AttentionMaskType.causal,
            position_embedding_type=PositionEmbeddingType.alibi,
            bias=True,
            tp_rank=config.mapping.tp_rank,
            quant_mode=config.quant_mode,
            **parallel,
        )
        self.mlp = MLP(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            hidden_act="gelu",
            dtype=config.dtype,
            bias=True,
            quant_mode=config.quant_mode,
            **parallel,
        )
        self.post_layernorm = LayerNorm(**norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        use_cache=False,
        kv_cache_params=None,
        attention_params=None,
    ):
        residual = hidden_states
        attention_output = self.attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        if use_cache:
            attention_output, presents = attention_output
        hidden_states = residual + attention_output
        hidden_states = hidden_states + self.mlp(self.post_layernorm(hidden_states))
        return (hidden_states, presents) if use_cache else hidden_states


class BloomModel(Module):
    """Embedding, LayerNorm, layers, LayerNorm."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        norm = {"normalized_shape": config.hidden_size, "eps": config.norm_epsilon, "dtype": config.dtype}
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.ln_embed = LayerNorm(**norm)
        self.layers = DecoderLayerList(BloomDecoderLayer, config)
        self.ln_f = LayerNorm(**norm)

    def forward(
        self,
        input_ids: Tensor,
        position_ids=None,
        use_cache=False,
        attention_mask=None,
        kv_cache_params=None,
        attention_params=None,
    ):
        hidden_states = self.ln_embed(self.vocab_embedding(input_ids))
        hidden_states = self.layers(
            hidden_states,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        if use_cache:
            hidden_states, presents = hidden_states
        hidden_states = self.ln_f(hidden_states)
        return (hidden_states, tuple(presents)) if use_cache else hidden_states


class BloomForCausalLM(DecoderModelForCausalLM):
    """Bloom with its output matrix."""

    def __init__(self, config: PretrainedConfig):
        lm_head = ColumnLinear(
            config.hidden_size,
            pad_vocab_size(config.vocab_size, config.mapping.tp_size),
            bias=False,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            gather_output=True,
        )
        super().__init__(config, BloomModel(config), lm_head)
