from ...layers import Attention
from ...module import Module, ModuleList
from ..modeling_utils import DecoderModelForCausalLM


class OwnDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, kv_cache_params=None,
                spec_decoding_params=None):
        return self.attention(hidden_states, kv_cache_params=kv_cache_params,
                              spec_decoding_params=spec_decoding_params)


class OwnLayerList(ModuleList):

    def __init__(self, cls, config):
        super().__init__([cls(config, i) for i in range(config.num_layers)])

    def forward(self, hidden_states, kv_cache_params, spec_decoding_params=None):
        for layer, past in zip(self, kv_cache_params):
            hidden_states = layer(hidden_states, kv_cache_params=past,
                                  spec_decoding_params=spec_decoding_params)
        return hidden_states


class OwnModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = OwnLayerList(OwnDecoderLayer, config)

    def forward(self, input_ids, kv_cache_params=None,
                spec_decoding_params=None):
        return self.layers(input_ids, kv_cache_params=kv_cache_params,
                           spec_decoding_params=spec_decoding_params)


class OwnForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, OwnModel(config), None)

    def forward(self, input_ids, last_token_ids=None, kv_cache_params=None,
                spec_decoding_params=None):
        return self.transformer.forward(input_ids=input_ids,
                                        kv_cache_params=kv_cache_params,
                                        spec_decoding_params=spec_decoding_params)
