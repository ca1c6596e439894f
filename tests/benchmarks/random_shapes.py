"""Ports and Hugging Face models of 7B shape with random weights in float16, made on a GPU for timing."""

from __future__ import annotations

from typing import Any

import torch

from porting_kit.alignment.reference import Reference, reference_from_model
from porting_kit.emulator import open_emulator
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree

SHAPES = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32}
              | {"num_key_value_heads": 32, "intermediate_size": 16384, "vocab_size": 250880, "hidden_act": "gelu"}
              | {"position_embedding_type": "alibi"}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
              | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "hidden_act": "silu"}
              | {"position_embedding_type": "rope_gpt_neox", "rotary_base": 1e6, "qwen_type": "qwen2"}),
}  # fmt: skip


def random_port(family: str, num_heads: int = 4) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of 7B shape in float16 with random weights; its heads share the base's output matrix."""
    source = open_source_tree("bundled")
    emulator = open_emulator(source, device="cuda")
    architecture, sizes = SHAPES[family]
    config = {
        "architecture": architecture,
        "dtype": "float16",
        "logits_dtype": "float32",
        "max_position_embeddings": 2048,
        "norm_epsilon": 1e-5,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "num_medusa_heads": num_heads,
        "num_medusa_layers": 1,
        "max_draft_len": 63,
        **sizes,
    }
    module = build_medusa_module(source, architecture)
    loaded = emulator.namespace.load_source(module.source)
    utils = emulator.namespace.import_module("tensorrt_llm.models.modeling_utils")
    skeleton = getattr(loaded, module.class_name)(utils.PretrainedConfig.from_dict(dict(config)))
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in skeleton.named_parameters():
        if parameter.is_inited():
            continue
        if name.startswith("medusa_heads") and name.endswith("lm_head.weight"):
            continue
        tensor = torch.randn(parameter.shape, dtype=torch.float16, device="cuda") * 0.02
        tensors[name] = tensor + 1 if "norm" in name or "ln_" in name else tensor
    if family == "bloom":  # tied, as the published Bloom models are
        tensors["lm_head.weight"] = tensors["transformer.vocab_embedding.weight"]
    for head in range(num_heads):
        tensors[f"medusa_heads.{head}.lm_head.weight"] = tensors["lm_head.weight"]
    model = emulator.build_model(config, tensors, module_source=module.source, class_name=module.class_name)
    return model, tensors


def random_reference(family: str) -> Reference:
    """The Hugging Face model of the same shape, in float16 on the GPU, random weights."""
    import transformers

    _, sizes = SHAPES[family]
    if family == "bloom":
        config = transformers.BloomConfig(
            vocab_size=sizes["vocab_size"], hidden_size=4096, n_layer=30, n_head=32, eos_token_id=None
        )
        kind = transformers.BloomForCausalLM
    else:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config = transformers.Qwen2Config(
            **{name: sizes[name] for name in names}, intermediate_size=18944, eos_token_id=None
        )
        kind = transformers.Qwen2ForCausalLM
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            model = kind(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return reference_from_model(model)
