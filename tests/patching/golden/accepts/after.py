from ...layers import Attention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class ReadyDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, spec_decoding_params=None):
        return self.attention(hidden_states,
                              spec_decoding_params=spec_decoding_params)


class ReadyModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(ReadyDecoderLayer, config)

    def forward(self, input_ids, **kwargs):
        return self.layers.forward(input_ids, **kwargs)


class ReadyForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, ReadyModel(config), None)
