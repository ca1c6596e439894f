from ...layers import Attention as SelfAttention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class BranchingDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        Kind = SelfAttention
        self.attention = Kind(config.hidden_size)

    def _run_attention(self, hidden_states, *, mask=None, norm_first=False,
                       spec_decoding_params=None):
        if norm_first:
            return self.attention(hidden_states, attention_mask=mask, norm_before_bmm1=True,
                                  spec_decoding_params=spec_decoding_params)
        return self.attention(hidden_states,
                              attention_mask=mask,
                              spec_decoding_params=spec_decoding_params)

    def forward(self, hidden_states, attention_mask=None,
                spec_decoding_params=None):
        if self.parallel:
            return hidden_states + self._run_attention(hidden_states, mask=attention_mask,
                                                       spec_decoding_params=spec_decoding_params)
        return self._run_attention(hidden_states, mask=attention_mask, norm_first=True,
                                   spec_decoding_params=spec_decoding_params)


class BranchingModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(BranchingDecoderLayer, config)

    def forward(self, input_ids, attention_mask=None, spec_decoding_params=None):
        return self.layers(input_ids, attention_mask=attention_mask,
                           spec_decoding_params=spec_decoding_params)


class BranchingForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, BranchingModel(config), None)
