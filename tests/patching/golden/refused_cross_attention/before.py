from ...layers import Attention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class CrossDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attention = Attention(config.hidden_size)
        self.cross_attention = Attention(config.hidden_size, cross_attention=True)

    def forward(self, hidden_states, encoder_output=None):
        hidden_states = self.self_attention(hidden_states)
        return self.cross_attention(hidden_states, encoder_output=encoder_output)


class CrossModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(CrossDecoderLayer, config)

    def forward(self, input_ids, encoder_output=None):
        return self.layers(input_ids, encoder_output=encoder_output)


class CrossForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, CrossModel(config), None)
