from ...layers import Attention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class OldDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, use_cache=False, kv_cache_params=None,
                medusa_packed_mask=None,
                medusa_position_offsets=None):
        return self.attention(hidden_states,
                              use_cache=use_cache,
                              kv_cache_params=kv_cache_params,
                              medusa_packed_mask=medusa_packed_mask,
                              medusa_position_offsets=medusa_position_offsets)


class OldModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(OldDecoderLayer, config)

    def forward(self, input_ids, use_cache=False, kv_cache_params=None,
                medusa_packed_mask=None,
                medusa_position_offsets=None):
        return self.layers.forward(input_ids,
                                   use_cache=use_cache,
                                   kv_cache_params=kv_cache_params,
                                   medusa_packed_mask=medusa_packed_mask,
                                   medusa_position_offsets=medusa_position_offsets)


class OldForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, OldModel(config), None)
