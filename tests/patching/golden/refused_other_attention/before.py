from ...layers import LatentAttention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class LatentDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = LatentAttention(config.hidden_size)

    def forward(self, hidden_states, kv_cache_params=None):
        return self.attention(hidden_states, kv_cache_params=kv_cache_params)


class LatentModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(LatentDecoderLayer, config)

    def forward(self, input_ids, kv_cache_params=None):
        return self.layers(input_ids, kv_cache_params=kv_cache_params)


class LatentForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, LatentModel(config), None)
