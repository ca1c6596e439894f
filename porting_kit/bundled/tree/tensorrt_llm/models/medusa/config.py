"""The config of LLaMA with Medusa heads."""

from ..llama.config import LLaMAConfig


class MedusaConfig(LLaMAConfig):
    """Adds the number of heads M, the residual layers R of each, and the draft tokens of a tree, N - 1."""

    def __init__(self, *, num_medusa_heads=4, num_medusa_layers=1, max_draft_len=63, **kwargs):
        self.num_medusa_heads = num_medusa_heads
        self.num_medusa_layers = num_medusa_layers
        self.max_draft_len = max_draft_len
        super().__init__(**kwargs)
