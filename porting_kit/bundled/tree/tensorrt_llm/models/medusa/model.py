"""Medusa: M extra heads on the last hidden state, each proposing the token one step further ahead."""

from ..._common import default_net
from ..._utils import pad_vocab_size
from ...functional import ACT2FN, stack
from ...layers import ColumnLinear
from ...module import Module, ModuleList
from ..llama.model import LLaMAForCausalLM
from .config import MedusaConfig


class MedusaLayer(Module):
    """x + act(W x + b)."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.activation = getattr(config, "medusa_hidden_act", "silu")
        self.linear = ColumnLinear(
            config.hidden_size,
            config.hidden_size,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            gather_output=True,
        )

    def forward(self, x):
        return x + ACT2FN[self.activation](self.linear(x))


class MedusaHead(Module):
    """R residual layers and an output matrix of its own."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.medusa_layers = ModuleList([MedusaLayer(config) for _ in range(config.num_medusa_layers)])
        self.lm_head = ColumnLinear(
            config.hidden_size,
            pad_vocab_size(config.vocab_size, config.mapping.tp_size),
            bias=False,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            gather_output=True,
        )

    def forward(self, x):
        for layer in self.medusa_layers:
            x = layer(x)
        return self.lm_head(x)


class MedusaForCausalLm(LLaMAForCausalLM):
    """LLaMA that returns the logits of its Medusa heads before its own."""

    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.num_medusa_heads = config.num_medusa_heads
        self.max_medusa_token_len = config.max_draft_len
        self.medusa_heads = ModuleList([MedusaHead(config) for _ in range(config.num_medusa_heads)])

    def forward(self, *args, **kwargs):
        """The base's outputs, preceded by the heads' logits [M, rows, Vp] on the last pipeline rank."""
        outputs = super().forward(*args, **kwargs)
        if not self.config.mapping.is_last_pp_rank():
            return outputs
        lm_logits, *cache, hidden_states = outputs
        medusa_logits = stack([head(hidden_states) for head in self.medusa_heads], dim=0)
        medusa_logits.mark_output("medusa_logits", self.config.logits_dtype)
        if kwargs.get("use_cache") and not default_net().plugin_config.paged_kv_cache:
            return (medusa_logits, lm_logits, *cache)
        return medusa_logits, lm_logits

    def prepare_inputs(self, *args, **kwargs):
        """Ask for the inputs of a tree of `max_draft_len` draft tokens that the engine itself proposes."""
        kwargs["speculative_decoding_draft_tokens_external"] = False
        kwargs["max_draft_len"] = self.max_medusa_token_len
        return super().prepare_inputs(*args, **kwargs)
