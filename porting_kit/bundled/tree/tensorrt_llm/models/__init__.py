"""The models, and the table that finds one by the architecture a checkpoint names."""

from .bloom.model import BloomForCausalLM
from .gptneox.model import GPTNeoXForCausalLM
from .llama.config import LLaMAConfig
from .llama.model import LLaMAForCausalLM
from .medusa.config import MedusaConfig
from .medusa.model import MedusaForCausalLm
from .modeling_utils import PretrainedConfig, PretrainedModel
from .qwen.model import QWenForCausalLM

__all__ = [
    "MODEL_MAP",
    "BloomForCausalLM",
    "GPTNeoXForCausalLM",
    "LLaMAConfig",
    "LLaMAForCausalLM",
    "MedusaConfig",
    "MedusaForCausalLm",
    "PretrainedConfig",
    "PretrainedModel",
    "QWenForCausalLM",
]

MODEL_MAP = {
    "BloomForCausalLM": BloomForCausalLM,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "LlamaForCausalLM": LLaMAForCausalLM,
    "MistralForCausalLM": LLaMAForCausalLM,
    "MedusaForCausalLM": MedusaForCausalLm,
    "Qwen2ForCausalLM": QWenForCausalLM,
    "QWenForCausalLM": QWenForCausalLM,
}
