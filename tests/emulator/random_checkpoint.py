"""Random checkpoints made from a model's own parameter list, without transformers."""

from __future__ import annotations

from typing import Any

import torch

from porting_kit.emulator import Emulator

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "position_embedding_type": "rope_gpt_neox", "hidden_act": "silu"},
    "bloom": {"architecture": "BloomForCausalLM", "position_embedding_type": "alibi", "num_key_value_heads": 8},
    "gptneox": {
        "architecture": "GPTNeoXForCausalLM",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_pct": 0.5,
        "num_key_value_heads": 8,
    },
}


def make_checkpoint(emulator: Emulator, family: str, **sizes: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config, float32 tensors) of a family; `sizes` overrides config fields."""
    config = {
        "dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "max_position_embeddings": 256,
        "hidden_act": "gelu",
        "rotary_base": 10000.0,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        **CONFIGS[family],
        **sizes,
    }
    utils = emulator.namespace.import_module("tensorrt_llm.models.modeling_utils")
    module = emulator.find_model_class(config["architecture"])(utils.PretrainedConfig.from_dict(dict(config)))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in module.named_parameters():
        if parameter.is_inited():
            continue
        tensor = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        tensors[name] = tensor + 1 if "norm" in name or "ln_" in name else tensor
    return config, tensors
