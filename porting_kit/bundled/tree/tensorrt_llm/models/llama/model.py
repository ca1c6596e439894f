"""LLaMA. Read this beside `bloom/model.py`: here the speculative-decoding parameters go all the way down."""

from ..._utils import pad_vocab_size
from ...functional import Tensor, recv, send
from ...layers import Attention, AttentionMaskType, ColumnLinear, Embedding, GatedMLP, PositionEmbeddingType, RmsNorm
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM
from .config import LLaMAConfig


class LLaMADecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the feed-forward block is gated."""

    def __init__(self, config: LLaMAConfig, layer_idx: int):
        super().__init__()
        parallel = {"tp_group": config.mapping.tp_group, "tp_size": config.mapping.tp_size}
        norm = {"normalized_shape": config.hidden_size, "eps": config.norm_epsilon, "dtype": config.dtype}
        self.input_layernorm = RmsNorm(**norm)
        self.attention = Attention(
            local_layer_idx=layer_idx - config.mapping.pp_layers(config.num_hidden_layers)[0],
            hidden_size=config.hidden_size,
            attention_head_size=config.head_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            dtype=config.dtype,
            attention_mask_type=AttentionMaskType.causal,
            bias=config.attn_bias,
            position_embedding_type=PositionEmbeddingType.rope_gpt_neox,
            rotary_embedding_base=config.rotary_base,
            rotary_embedding_scaling=config.rotary_scaling,
            tp_rank=config.mapping.tp_rank,
            quant_mode=config.quant_mode,
            **parallel,
        )
        self.mlp = GatedMLP(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            dtype=config.dtype,
            bias=config.mlp_bias,
            quant_mode=config.quant_mode,
            **parallel,
        )
        self.post_layernorm = RmsNorm(**norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        use_cache=False,
        spec_decoding_params=None,
        kv_cache_params=None,
        attention_params=None,
    ):
        residual = hidden_states
        attention_output = self.attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            use_cache=use_cache,
            spec_decoding_params=spec_decoding_params,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        if use_cache:
            attention_output, presents = attention_output
        hidden_states = residual + attention_output
        hidden_states = hidden_states + self.mlp(self.post_layernorm(hidden_states))
        return (hidden_states, presents) if use_cache else hidden_states


class LLaMAModel(Module):
    """Embedding on the first pipeline rank, layers, RmsNorm on the last."""

    def __init__(self, config: LLaMAConfig):
        super().__init__()
        self.mapping = config.mapping
        if self.mapping.is_first_pp_rank():
            self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.layers = DecoderLayerList(LLaMADecoderLayer, config)
        if self.mapping.is_last_pp_rank():
            self.ln_f = RmsNorm(normalized_shape=config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids=None,
        use_cache=False,
        attention_mask=None,
        spec_decoding_params=None,
        kv_cache_params=None,
        attention_params=None,
        hidden_states=None,
    ):
        if self.mapping.is_first_pp_rank():
            hidden_states = self.vocab_embedding(input_ids)
        else:
            hidden_states = recv(hidden_states, self.mapping.prev_pp_rank())
        hidden_states = self.layers.forward(
            hidden_states,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            spec_decoding_params=spec_decoding_params,
        )
        if use_cache:
            hidden_states, presents = hidden_states
        if self.mapping.is_last_pp_rank():
            hidden_states = self.ln_f(hidden_states)
        else:
            hidden_states = send(hidden_states, self.mapping.next_pp_rank())
        return (hidden_states, tuple(presents)) if use_cache else hidden_states


class LLaMAForCausalLM(DecoderModelForCausalLM):
    """LLaMA with its output matrix, which only the last pipeline rank holds."""

    config_class = LLaMAConfig

    def __init__(self, config: LLaMAConfig):
        lm_head = None
        if config.mapping.is_last_pp_rank():
            lm_head = ColumnLinear(
                config.hidden_size,
                pad_vocab_size(config.vocab_size, config.mapping.tp_size),
                bias=False,
                dtype=config.dtype,
                tp_group=config.mapping.tp_group,
                tp_size=config.mapping.tp_size,
                gather_output=True,
            )
        super().__init__(config, LLaMAModel(config), lm_head)
