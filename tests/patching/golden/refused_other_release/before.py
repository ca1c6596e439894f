from ...layers import Attention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class HalfDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self,
                hidden_states,
                spec_decoding_packed_mask=None,
                spec_decoding_position_offsets=None,
                use_cache=False):
        return self.attention(
            hidden_states,
            spec_decoding_packed_mask=spec_decoding_packed_mask,
            spec_decoding_position_offsets=spec_decoding_position_offsets,
            use_cache=use_cache)


class HalfModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(HalfDecoderLayer, config)

    def forward(self,
                input_ids,
                spec_decoding_packed_mask=None,
                use_cache=False):
        return self.layers.forward(
            input_ids,
            use_cache=use_cache,
            # spec_decoding_packed_mask=spec_decoding_packed_mask,
        )


class HalfForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, HalfModel(config), None)
