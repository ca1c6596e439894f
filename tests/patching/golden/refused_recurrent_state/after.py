from ...layers import Attention, Mamba
from ...module import Module, ModuleList
from ..modeling_utils import PretrainedModel


class HybridLayer(Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = Attention(config.hidden_size)
        self.ssm = Mamba(config.hidden_size)

    def forward(self, hidden_states, ssm_state=None, kv_cache_params=None):
        if ssm_state is not None:
            return self.ssm(hidden_states, ssm_state)
        return self.attention(hidden_states, kv_cache_params=kv_cache_params)


class HybridForCausalLM(PretrainedModel):

    def __init__(self, config):
        super().__init__(config)
        self.layers = ModuleList([HybridLayer(config, i) for i in range(4)])

    def forward(self, input_ids, ssm_states=None):
        for layer, state in zip(self.layers, ssm_states):
            input_ids = layer(input_ids, ssm_state=state)
        return input_ids
