from ...layers import Attention as SelfAttention
from ...module import Module
from ..modeling_utils import DecoderLayerList, DecoderModelForCausalLM


class BranchingDecoderLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        Kind = SelfAttention
        self.attention = Kind(config.hidden_size)

    def _run_attention(self, hidden_states, *, mask=None, norm_first=False):
        if norm_first:
            return self.attention(hidden_states, attention_mask=mask, norm_before_bmm1=True)
        return self.attention(hidden_states,
                              attention_mask=mask)

    def forward(self, hidden_states, attention_mask=None):
        if self.parallel:
            return hidden_states + self._run_attention(hidden_states, mask=attention_mask)
        return self._run_attention(hidden_states, mask=attention_mask, norm_first=True)


class BranchingModel(Module):

    def __init__(self, config):
        super().__init__()
        self.layers = DecoderLayerList(BranchingDecoderLayer, config)

    def forward(self, input_ids, attention_mask=None):
        return self.layers(input_ids, attention_mask=attention_mask)


class BranchingForCausalLM(DecoderModelForCausalLM):

    def __init__(self, config):
        super().__init__(config, BranchingModel(config), None)
