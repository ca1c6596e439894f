"""Models made from the rules themselves: every source tensor a family asks for, random, without transformers.

Sizes follow the letters: E 32, L 2, H 4, K 2, D 8, I 48, V 37 (odd on purpose), X 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from porting_kit.architectures import read_base_config
from porting_kit.architectures.base_config import BaseConfig

LIKE_LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 37, "n_positions": 64}
ALL_HEADS = {**LIKE_LLAMA, "num_key_value_heads": 4}
FOUR_TIMES = {**ALL_HEADS, "intermediate_size": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM = {"num_layers": 2, "ffn_hidden_size": 48, "multi_query_attention": True, "multi_query_group_num": 2}
GLM |= {"padded_vocab_size": 37, "seq_length": 64, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8}
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 37, "max_seq_len": 64}
DBRX |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}}

# family -> (class name, config)
RAW: dict[str, tuple[str, dict[str, Any]]] = {
    "arctic": (
        "ArcticForCausalLM",
        {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
        | {"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
    ),
    "baichuan": ("BaichuanForCausalLM", ALL_HEADS),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 37}),
    "chatglm": ("ChatGLMModel", GLM),
    "cohere": ("CohereForCausalLM", {**LIKE_LLAMA, "use_qk_norm": True, "attention_bias": True}),
    "dbrx": ("DbrxForCausalLM", DBRX),
    "deepseek_v1": ("DeepseekForCausalLM", {**LIKE_LLAMA, **MOE, "n_shared_experts": 2}),
    "exaone": ("ExaoneForCausalLM", LIKE_LLAMA),
    "falcon": (
        "FalconForCausalLM",
        {**LIKE_LLAMA, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True, "ffn_hidden_size": 48}
        | {"num_key_value_heads": None, "intermediate_size": None},
    ),
    "gemma": ("GemmaForCausalLM", {**LIKE_LLAMA, "head_dim": 16, "vocab_size": 40}),
    "gemma2": ("Gemma2ForCausalLM", {**LIKE_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 40}),
    "gemma3": ("Gemma3ForCausalLM", {**LIKE_LLAMA, "head_dim": 16, "sliding_window": 16, "vocab_size": 40}),
    "gpt2": ("GPT2LMHeadModel", LIKE_GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", LIKE_GPT2),
    "gptj": ("GPTJForCausalLM", {**LIKE_GPT2, "rotary_dim": 4}),
    "gptneox": ("GPTNeoXForCausalLM", {**FOUR_TIMES, "rotary_emb_base": 30000, "rotary_pct": 0.5}),
    "grok": ("Grok1ModelForCausalLM", {**LIKE_LLAMA, **MOE, "intermediate_size": 16, "moe_intermediate_size": None}),
    "internlm2": ("InternLM2ForCausalLM", {**LIKE_LLAMA, "bias": True}),
    "jais": (
        "JAISLMHeadModel",
        {**LIKE_GPT2, "n_inner": 48, "position_embedding_type": "alibi", "activation_function": "swiglu"}
        | {"width_scale": 0.25, "embeddings_scale": 14.0},
    ),
    "llama": ("LlamaForCausalLM", {**LIKE_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mixtral": (
        "MixtralForCausalLM",
        {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    ),
    "mpt": ("MPTForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 37, "max_seq_len": 64}),
    "nemotron": ("NemotronForCausalLM", LIKE_LLAMA),
    "nemotron_nas": (
        "DeciLMForCausalLM",
        {**LIKE_LLAMA, "num_key_value_heads": None, "intermediate_size": None, "num_hidden_layers": 4}
        | {
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 20.0}},
            ]
        },
    ),
    "opt": ("OPTForCausalLM", {**ALL_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 24}),
    "persimmon": ("PersimmonForCausalLM", ALL_HEADS),
    "phi": ("PhiForCausalLM", ALL_HEADS),
    "phi3": ("Phi3ForCausalLM", LIKE_LLAMA),
    "phi3_small": (
        "Phi3SmallForCausalLM",
        {**LIKE_LLAMA, "intermediate_size": None, "ff_intermediate_size": 48, "dense_attention_every_n_layers": 1},
    ),
    "phimoe": (
        "PhiMoEForCausalLM",
        {**LIKE_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    ),
    "qwen": ("QWenLMHeadModel", {**ALL_HEADS, "intermediate_size": 96, "layer_norm_epsilon": 1e-6}),
    "qwen2": ("Qwen2ForCausalLM", {**LIKE_LLAMA, "rope_theta": 1e6}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**LIKE_LLAMA, **MOE, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3ForCausalLM", {**LIKE_LLAMA, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**LIKE_LLAMA, **MOE, "head_dim": 16, "norm_topk_prob": True}),
    "starcoder2": ("Starcoder2ForCausalLM", LIKE_LLAMA),
}


def raw_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a family; `None` removes a key."""
    name, keys = RAW[family]
    raw = {"architectures": [name], **keys, **changes}
    return {key: value for key, value in raw.items() if value is not None}


def source_shapes(base: BaseConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family's rules read for this model (no output matrix where it is tied)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in base.definition.rules:
        if rule.zeros_when_absent:
            continue
        first = 1 if rule.tied_from and base.tied else 0  # the embedding stands in for the output matrix
        for numbers, _, sources in rule.expand(base.dims, base.layer_dims):
            if base.applies(rule.when, numbers.get("i")):
                shapes.update(sources[first:])
    return shapes


def random_tensors(base: BaseConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random values for `source_shapes`."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in source_shapes(base).items()}


def write_model(
    folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, dtype=torch.float32
) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors; the tensors are made from the rules unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(read_base_config(raw), dtype) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors")
    return tensors


def head_tensors(num_heads: int, num_layers: int = 1, hidden: int = 32, vocab: int = 37) -> dict[str, torch.Tensor]:
    """Heads in the original layout, random."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=generator)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator)
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(vocab, hidden, generator=generator)
    return tensors
