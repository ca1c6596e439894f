from ...layers import MOE, Attention
from ...module import Module, ModuleList
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class DenseDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config.hidden_size)

    def forward(self, hidden_states, attention_params=None,
                spec_decoding_params=None):
        return self.attention(hidden_states, attention_params=attention_params,
                              spec_decoding_params=spec_decoding_params)


class SparseDecoderLayer(Module):

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config.hidden_size)
        self.mlp = MOE(config.hidden_size)

    def forward(self, hidden_states, attention_params=None,
                spec_decoding_params=None):
        return self.mlp(
            self.self_attn(hidden_states, attention_params=attention_params,
                           spec_decoding_params=spec_decoding_params))


class MixedModel(Module):

    def __init__(self, config):
        super().__init__()
        self.dense_layers = DecoderLayerList(DenseDecoderLayer, config)
        self.sparse_layers = DecoderLayerList(SparseDecoderLayer, config)

    def forward(self, input_ids, attention_params=None,
                spec_decoding_params=None):
        hidden_states = self.dense_layers(input_ids,
                                          attention_params=attention_params,
                                          spec_decoding_params=spec_decoding_params)
        return self.sparse_layers(hidden_states,
                                  attention_params=attention_params,
                                  spec_decoding_params=spec_decoding_params)


class MixedForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, MixedModel(config), None)
