from ...layers import Attention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class GreedyDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, *args, use_cache=False, **kwargs):
        return self.attention(args[0], use_cache=use_cache)


class GreedyModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(GreedyDecoderLayer, config)

    def forward(self, input_ids, use_cache=False, **kwargs):
        return self.layers(input_ids, use_cache=use_cache)


class GreedyForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, GreedyModel(config), None)

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
