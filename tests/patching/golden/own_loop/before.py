from ...layers import Attention, KeyValueCacheParams
from ...module import Module, ModuleList
from ..modeling_utils import DecoderModelForCausalLM


class LoopDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, use_cache=False, kv_cache_params=None):
        return self.attention(hidden_states, use_cache=use_cache,
                              kv_cache_params=kv_cache_params)


class LoopModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = ModuleList(
            [LoopDecoderLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, input_ids, use_cache=False, kv_cache_params=None):
        hidden_states = input_ids
        for index, (layer, past) in enumerate(
                zip(self.layers, kv_cache_params.past_key_value)):
            hidden_states = layer(
                hidden_states,
                use_cache=use_cache,
                kv_cache_params=KeyValueCacheParams(past_key_value=[past]))
        return hidden_states


class LoopForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, LoopModel(config), None)
