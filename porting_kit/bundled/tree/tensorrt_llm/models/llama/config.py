"""The config of LLaMA-like models."""

from ..modeling_utils import PretrainedConfig


class LLaMAConfig(PretrainedConfig):
    """Adds biases and rotary settings to the common fields."""

    def __init__(self, *, mlp_bias=False, attn_bias=False, rotary_base=10000.0, rotary_scaling=None, **kwargs):
        self.mlp_bias = mlp_bias
        self.attn_bias = attn_bias
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        super().__init__(**kwargs)
