from ...layers import Attention, Embedding
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class BothDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, use_cache=False,
                medusa_packed_mask=None,
                medusa_position_offsets=None):
        return self.attention(hidden_states, use_cache=use_cache,
                              medusa_packed_mask=medusa_packed_mask,
                              medusa_position_offsets=medusa_position_offsets)


class BothModel(Module):

    def __init__(self, config):
        super().__init__()
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings,
                                            config.hidden_size)
        self.layers = DecoderLayerList(BothDecoderLayer, config)

    def forward(self, input_ids, position_ids=None, use_cache=False,
                medusa_packed_mask=None,
                medusa_position_offsets=None):
        hidden_states = self.vocab_embedding(input_ids)
        hidden_states = hidden_states + self.position_embedding(position_ids)
        return self.layers(hidden_states, use_cache=use_cache,
                           position_ids=position_ids,
                           medusa_packed_mask=medusa_packed_mask,
                           medusa_position_offsets=medusa_position_offsets)


class BothForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, BothModel(config), None)
