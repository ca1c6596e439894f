from ...layers import Attention
from ...module import Module, ModuleList
from ..generation_mixin import GenerationMixin


class EarlyDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, kv_cache_params=None):
        return self.attention(hidden_states, kv_cache_params=kv_cache_params)


class EarlyModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = ModuleList([EarlyDecoderLayer(config) for _ in range(2)])

    def forward(self, input_ids, kv_cache_params=None):
        for layer, past in zip(self.layers, kv_cache_params.past_key_value):
            input_ids = layer(input_ids, kv_cache_params=past)
        return input_ids


class EarlyForCausalLM(EarlyModel, GenerationMixin):

    def forward(self, input_ids, kv_cache_params=None):
        return super().forward(input_ids, kv_cache_params)

    def prepare_inputs(self, max_batch_size):
        return (self.prepare_basic_inputs(max_batch_size), )
