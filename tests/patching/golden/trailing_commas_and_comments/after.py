from tensorrt_llm.layers import Attention
from tensorrt_llm.models.modeling_utils import DecoderLayerList, DecoderModelForCausalLM
from tensorrt_llm.module import Module


class TidyDecoderLayer(Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = Attention(local_layer_idx=layer_idx, hidden_size=config.hidden_size)

    def forward(
        self,
        hidden_states: "Tensor",
        use_cache: bool = False,
        kv_cache_params=None,  # the cache
        attention_params=None,  # the lengths
        spec_decoding_params=None,
    ) -> "Tensor":
        return self.attn(
            hidden_states,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,  # no comma before this comment
            spec_decoding_params=spec_decoding_params
        )


class TidyModel(Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = DecoderLayerList(TidyDecoderLayer, config)

    def forward(self, input_ids, position_ids=None, use_cache=False, kv=None, attn=None,
                spec_decoding_params=None,):
        return self.blocks.forward(input_ids, use_cache=use_cache, kv_cache_params=kv, attention_params=attn,
                                   spec_decoding_params=spec_decoding_params,)


class TidyForCausalLM(DecoderModelForCausalLM):
    def __init__(self, config):
        super().__init__(config, TidyModel(config), None)
