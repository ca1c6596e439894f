from ...layers import Attention, Embedding
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class TableDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, use_cache=False, spec_decoding_params=None):
        return self.attention(hidden_states, use_cache=use_cache,
                              spec_decoding_params=spec_decoding_params)


def spread_position_ids(position_ids, input_ids, attention_params,
                        spec_decoding_params):
    """Position ids for every token, where the runtime feeds one per request.

    A request in the generation phase brings as many tokens as the offsets have
    columns. Context requests come first, with one id per token already. How
    many there are of each follows from the shapes.
    """
    from tensorrt_llm._common import default_net
    from tensorrt_llm.functional import (cast, concat, maximum, shape, slice,
                                         unsqueeze)
    packed = default_net().plugin_config.remove_input_padding
    if spec_decoding_params is None or not packed:
        return position_ids
    offsets = spec_decoding_params.spec_decoding_position_offsets
    sequence_length = attention_params.sequence_length
    nodes = shape(offsets, 1)
    surplus = shape(input_ids, 0) - shape(position_ids, 0)
    requests = surplus / maximum(nodes - 1, 1)
    context_tokens = shape(position_ids, 0) - requests
    first = shape(sequence_length, 0) - requests

    context_ids = slice(position_ids, [0], concat([context_tokens]))
    # The tokens of this call are counted in sequence_length.
    past = slice(sequence_length, concat([first]), concat([requests])) - nodes
    offsets = slice(offsets, [0, 0], concat([requests, nodes]))
    tree_ids = (unsqueeze(past, 1) + offsets).view(concat([requests * nodes]))
    return concat([context_ids, cast(tree_ids, position_ids.dtype)], dim=0)


class TableModel(Module):

    def __init__(self, config):
        super().__init__()
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings,
                                            config.hidden_size)
        self.layers = DecoderLayerList(TableDecoderLayer, config)

    def forward(self, input_ids, position_ids=None, use_cache=False,
                attention_params=None,
                spec_decoding_params=None):
        hidden_states = self.vocab_embedding(input_ids)
        hidden_states = hidden_states + self.position_embedding(spread_position_ids(position_ids, input_ids,
                                                                                    attention_params,
                                                                                    spec_decoding_params))
        return self.layers(hidden_states, use_cache=use_cache,
                           attention_params=attention_params,
                           spec_decoding_params=spec_decoding_params)


class TableForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, TableModel(config), None)
