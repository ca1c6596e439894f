from ...layers import Attention, Embedding
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class TableDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, use_cache=False):
        return self.attention(hidden_states, use_cache=use_cache)


class TableModel(Module):

    def __init__(self, config):
        super().__init__()
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings,
                                            config.hidden_size)
        self.layers = DecoderLayerList(TableDecoderLayer, config)

    def forward(self, input_ids, position_ids=None, use_cache=False,
                attention_params=None):
        hidden_states = self.vocab_embedding(input_ids)
        hidden_states = hidden_states + self.position_embedding(position_ids)
        return self.layers(hidden_states, use_cache=use_cache,
                           attention_params=attention_params)


class TableForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, TableModel(config), None)
