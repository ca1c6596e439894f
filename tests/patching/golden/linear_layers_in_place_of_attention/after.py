from ...layers import Attention, ColumnLinear
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class LinearAttention(ColumnLinear):

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states)


class PrunedDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.is_linear = config.linear_layers[layer_idx]
        if self.is_linear:
            self.attention = LinearAttention(config.hidden_size, config.hidden_size)
        else:
            self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, kv_cache_params=None, attention_params=None,
                spec_decoding_params=None):
        if self.is_linear:
            return self.attention(hidden_states)
        return self.attention(hidden_states, kv_cache_params=kv_cache_params,
                              attention_params=attention_params,
                              spec_decoding_params=spec_decoding_params)


class PrunedModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(PrunedDecoderLayer, config)

    def forward(self, input_ids, kv_cache_params=None, attention_params=None,
                spec_decoding_params=None):
        return self.layers(input_ids, kv_cache_params=kv_cache_params,
                           attention_params=attention_params,
                           spec_decoding_params=spec_decoding_params)


class PrunedForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, PrunedModel(config), None)
