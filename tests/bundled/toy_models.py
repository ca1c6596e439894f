"""Tiny Hugging Face models with random weights, and the same weights under TensorRT-LLM's names.

The mapping is written out by hand here, per family and on purpose: it must not share code with the converter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

E, L, H, K, D, V, F = 32, 2, 4, 2, 8, 61, 48

# A root, two children, a child of the first: each row's bits name the nodes it sees, itself included.
TREE_PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))
POSITION_OFFSETS = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
PACKED_MASK = torch.tensor([[0b0001], [0b0011], [0b0101], [0b1011]], dtype=torch.int32)


@dataclass(frozen=True)
class ToyModel:
    """A Hugging Face model, and its config and tensors as a TensorRT-LLM checkpoint holds them."""

    hf: PreTrainedModel
    config: dict
    tensors: dict[str, torch.Tensor]


def make_toy_model(family: str, seed: int = 0) -> ToyModel:
    """A float32 toy model of one family: bloom, gptneox, llama or qwen."""
    torch.manual_seed(seed)
    hf, architecture, extra = MAKERS[family]()
    with torch.no_grad():
        for parameter in hf.parameters():
            # Norm weights away from one, biases away from zero: a swapped or lost tensor must show.
            parameter.add_(torch.randn_like(parameter) * 0.3)
    weights = dict(hf.state_dict())
    # transformers 4 and 5 name GPT-NeoX's output matrix differently.
    weights["lm_head.weight"] = hf.get_output_embeddings().weight.detach()
    tensors = {name: tensor.clone() for name, tensor in RENAMERS[family](weights).items()}
    config = {
        "architecture": architecture,
        "dtype": "float32",
        "hidden_size": E,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "vocab_size": V,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 128,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        **extra,
    }
    return ToyModel(hf.eval(), config, tensors)


def _make_bloom():
    hf = BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=E, n_layer=L, n_head=H))
    return hf, "BloomForCausalLM", {"position_embedding_type": "alibi", "intermediate_size": 4 * E}


def _make_gptneox():
    hf = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=V,
            hidden_size=E,
            num_hidden_layers=L,
            num_attention_heads=H,
            intermediate_size=4 * E,
            rotary_pct=0.5,
            hidden_act="gelu_new",
            max_position_embeddings=128,
        )
    )
    extra = {"hidden_act": "gelu", "intermediate_size": 4 * E, "rotary_pct": 0.5, "rotary_emb_base": 10000.0}
    return hf, "GPTNeoXForCausalLM", {**extra, "position_embedding_type": "rope_gpt_neox"}


def _llama_like(config_class, model_class):
    return model_class(
        config_class(
            vocab_size=V,
            hidden_size=E,
            num_hidden_layers=L,
            num_attention_heads=H,
            num_key_value_heads=K,
            intermediate_size=F,
            rms_norm_eps=1e-5,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )


LLAMA_LIKE = {
    "num_key_value_heads": K,
    "hidden_act": "silu",
    "intermediate_size": F,
    "position_embedding_type": "rope_gpt_neox",
    "rotary_base": 10000.0,
}


def _make_llama():
    return _llama_like(LlamaConfig, LlamaForCausalLM), "LlamaForCausalLM", LLAMA_LIKE


def _make_qwen():
    return _llama_like(Qwen2Config, Qwen2ForCausalLM), "Qwen2ForCausalLM", {**LLAMA_LIKE, "qwen_type": "qwen2"}


def _ungroup_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Rows ordered head by head as q, k, v -> all q, all k, all v."""
    return tensor.view(H, 3, D, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def _rename_bloom(weights):
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_layernorm",
        "self_attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.fc",
        "mlp.dense_4h_to_h": "mlp.proj",
    }
    tensors = {"lm_head.weight": weights["lm_head.weight"]}
    tensors["transformer.vocab_embedding.weight"] = weights["transformer.word_embeddings.weight"]
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_embed.{kind}"] = weights[f"transformer.word_embeddings_layernorm.{kind}"]
        tensors[f"transformer.ln_f.{kind}"] = weights[f"transformer.ln_f.{kind}"]
        for layer in range(L):
            old, new = f"transformer.h.{layer}", f"transformer.layers.{layer}"
            fused = weights[f"{old}.self_attention.query_key_value.{kind}"]
            tensors[f"{new}.attention.qkv.{kind}"] = _ungroup_heads(fused)
            for source, target in names.items():
                tensors[f"{new}.{target}.{kind}"] = weights[f"{old}.{source}.{kind}"]
    return tensors


def _rename_gptneox(weights):
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.fc",
        "mlp.dense_4h_to_h": "mlp.proj",
    }
    tensors = {"lm_head.weight": weights["lm_head.weight"]}
    tensors["transformer.vocab_embedding.weight"] = weights["gpt_neox.embed_in.weight"]
    for kind in ("weight", "bias"):
        tensors[f"transformer.ln_f.{kind}"] = weights[f"gpt_neox.final_layer_norm.{kind}"]
        for layer in range(L):
            old, new = f"gpt_neox.layers.{layer}", f"transformer.layers.{layer}"
            fused = weights[f"{old}.attention.query_key_value.{kind}"]
            tensors[f"{new}.attention.qkv.{kind}"] = _ungroup_heads(fused)
            for source, target in names.items():
                tensors[f"{new}.{target}.{kind}"] = weights[f"{old}.{source}.{kind}"]
    return tensors


def _rename_llama_like(weights):
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_layernorm",
        "self_attn.o_proj": "attention.dense",
        "mlp.gate_proj": "mlp.fc",
        "mlp.up_proj": "mlp.gate",
        "mlp.down_proj": "mlp.proj",
    }
    tensors = {"lm_head.weight": weights["lm_head.weight"]}
    tensors["transformer.vocab_embedding.weight"] = weights["model.embed_tokens.weight"]
    tensors["transformer.ln_f.weight"] = weights["model.norm.weight"]
    for layer in range(L):
        old, new = f"model.layers.{layer}", f"transformer.layers.{layer}"
        for source, target in names.items():
            tensors[f"{new}.{target}.weight"] = weights[f"{old}.{source}.weight"]
        for kind in ("weight", "bias"):
            parts = [f"{old}.self_attn.{each}_proj.{kind}" for each in "qkv"]
            if parts[0] in weights:
                tensors[f"{new}.attention.qkv.{kind}"] = torch.cat([weights[part] for part in parts])
    return tensors


MAKERS = {"bloom": _make_bloom, "gptneox": _make_gptneox, "llama": _make_llama, "qwen": _make_qwen}
RENAMERS = {
    "bloom": _rename_bloom,
    "gptneox": _rename_gptneox,
    "llama": _rename_llama_like,
    "qwen": _rename_llama_like,
}
