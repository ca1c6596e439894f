from ...layers import Attention, LayerNorm
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class PlainDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = LayerNorm(normalized_shape=config.hidden_size)
        self.attention = Attention(local_layer_idx=layer_idx,
                                   hidden_size=config.hidden_size)

    def forward(self,
                hidden_states,
                attention_mask=None,
                use_cache=False,
                kv_cache_params=None,
                attention_params=None,
                spec_decoding_params=None):
        # A comment, and "a string with attention_params=attention_params)".
        output = self.attention(self.norm(hidden_states),
                                attention_mask=attention_mask,
                                use_cache=use_cache,
                                kv_cache_params=kv_cache_params,
                                attention_params=attention_params,
                                spec_decoding_params=spec_decoding_params)
        if use_cache:
            output, presents = output
            return (hidden_states + output, presents)
        return hidden_states + output


class PlainModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(PlainDecoderLayer, config)

    def forward(self, input_ids, position_ids=None, use_cache=False,
                kv_cache_params=None, attention_params=None,
                spec_decoding_params=None):
        return self.layers(input_ids, use_cache=use_cache,
                           kv_cache_params=kv_cache_params,
                           attention_params=attention_params,
                           spec_decoding_params=spec_decoding_params)


class PlainForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, PlainModel(config), None)
