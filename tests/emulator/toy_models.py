"""Random Hugging Face models of every family, small or of a given size, and their converted checkpoints in memory.

A model's activation is set to the tanh form of GELU where TensorRT-LLM knows no other, so that what is compared is
the port and not that inherent difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.convert import checkpoint_tensors

VOCAB = 99
LAYERS = 2
POSITIONS = 160


@dataclass(frozen=True)
class ToySize:
    """Sizes of a toy model: E, L, H, K, MLP width, V and trained positions."""

    hidden_size: int = 64
    layers: int = LAYERS
    heads: int = 8
    kv_heads: int = 2
    inner: int = 256
    vocab: int = VOCAB
    positions: int = POSITIONS


def _modern(size: ToySize, **more: Any) -> dict[str, Any]:
    """Config keys in the spelling of current models."""
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.positions,
        "tie_word_embeddings": False,
        **more,
    }


def _early(size: ToySize, **more: Any) -> dict[str, Any]:
    """Config keys in the spelling of GPT-2 and its like."""
    return {
        "vocab_size": size.vocab,
        "n_embd": size.hidden_size,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_positions": size.positions,
        **more,
    }


def _make(name: str, **config: Any) -> Any:
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{suffix}")(config_class(**config))


def _falcon(size: ToySize, kind: str) -> Any:
    common = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "attn_implementation": "sdpa",
    }
    kinds = {
        "7b": {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False},
        "40b": {"num_kv_heads": size.kv_heads, "new_decoder_architecture": True, "bias": False},
        "rw": {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "bias": True},
    }
    return _make("Falcon", **common, **kinds[kind], alibi=kind == "rw")


LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.5, 2.5, 3.5, 6.0],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MAKERS: dict[str, Callable[[ToySize], Any]] = {
    "llama": lambda s: _make("Llama", **_modern(s)),
    "llama-bias": lambda s: _make("Llama", **_modern(s, attention_bias=True)),
    "llama-linear": lambda s: _make("Llama", **_modern(s, rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "llama-llama3": lambda s: _make("Llama", **_modern(s, rope_theta=5e5, rope_scaling=dict(LLAMA3_ROPE))),
    "mistral": lambda s: _make("Mistral", **_modern(s, sliding_window=None)),
    "mixtral": lambda s: _make(
        "Mixtral", **_modern(s, sliding_window=None, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2": lambda s: _make("Qwen2", **_modern(s)),
    "bloom": lambda s: _make("Bloom", vocab_size=s.vocab, hidden_size=s.hidden_size, n_layer=s.layers, n_head=s.heads),
    "gptneox": lambda s: _make("GPTNeoX", **_modern(s, rotary_pct=0.25, hidden_act="gelu_new", rope_theta=10000)),
    "gpt2": lambda s: _make("GPT2", **_early(s)),
    "gpt_bigcode": lambda s: _make("GPTBigCode", **_early(s, multi_query=True)),
    "starcoder2": lambda s: _make("Starcoder2", **_modern(s, sliding_window=None)),
    "gptj": lambda s: _make("GPTJ", **_early(s, rotary_dim=s.hidden_size // s.heads // 2)),
    "opt": lambda s: _make(
        "OPT",
        vocab_size=s.vocab,
        hidden_size=s.hidden_size,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        ffn_dim=s.inner,
        max_position_embeddings=s.positions,
        word_embed_proj_dim=s.hidden_size,
    ),
    "falcon-7b": lambda s: _falcon(s, "7b"),
    "falcon-40b": lambda s: _falcon(s, "40b"),
    "falcon-rw": lambda s: _falcon(s, "rw"),
    "mpt": lambda s: _make(
        "Mpt", vocab_size=s.vocab, d_model=s.hidden_size, n_heads=s.heads, n_layers=s.layers, max_seq_len=s.positions
    ),
    "phi": lambda s: _make(
        "Phi", **{**_modern(s, partial_rotary_factor=0.5, hidden_act="gelu_new"), "num_key_value_heads": s.heads}
    ),
    "phi3": lambda s: _make("Phi3", **_modern(s, sliding_window=None, pad_token_id=0)),
    "phi3-long": lambda s: _make(
        "Phi3",
        **_modern(s, sliding_window=None, pad_token_id=0),
        original_max_position_embeddings=32,
        rope_scaling=dict(LONG_ROPE),
    ),
    "gemma": lambda s: _make(
        "Gemma",
        **{**_modern(s, head_dim=16, hidden_activation="gelu_pytorch_tanh"), "tie_word_embeddings": True},
    ),
    "gemma2": lambda s: _make(
        "Gemma2",
        **{**_modern(s, head_dim=16, query_pre_attn_scalar=24, sliding_window=4096), "tie_word_embeddings": True},
        attn_implementation="eager",
    ),
    "dbrx": lambda s: _make(
        "Dbrx",
        vocab_size=s.vocab,
        d_model=s.hidden_size,
        n_heads=s.heads,
        n_layers=s.layers,
        max_seq_len=s.positions,
        attn_config={"kv_n_heads": s.kv_heads, "clip_qkv": 0.8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": s.hidden_size},
    ),
    "cohere": lambda s: _make("Cohere", **{**_modern(s, logit_scale=0.25), "tie_word_embeddings": True}),
}


def make_reference(family: str, size: ToySize | None = None, seed: int = 1) -> Any:
    """A random Hugging Face model whose weights are large enough for differences to show."""
    model = MAKERS[family](size or ToySize())
    torch.manual_seed(seed)
    # Logits of order one whatever the width: a random projection of n inputs gains sqrt(n).
    std = 1.0 / (size or ToySize()).hidden_size ** 0.5
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        mean = 1.0 if is_norm and not family.startswith("gemma") else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.1 if is_norm else std)
    use_tanh_gelu(model)
    return model.eval()


def use_tanh_gelu(model: Any) -> None:
    """Replace the erf form of GELU, which TensorRT-LLM does not have, by the tanh form."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            is_erf = type(child).__name__ == "GELUActivation" or (
                isinstance(child, torch.nn.GELU) and child.approximate == "none"
            )
            if is_erf:
                setattr(module, name, torch.nn.GELU("tanh"))


def save_reference(model: Any, folder: Path) -> Path:
    """Save a Hugging Face model as a folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def build_case(
    family: str, size: ToySize | None = None, *, dtype: str = "float32", release: str | None = None
) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """(Hugging Face model, checkpoint config, checkpoint tensors)."""
    model = make_reference(family, size)
    with tempfile.TemporaryDirectory() as folder:
        save_reference(model, Path(folder))
        config, tensors = checkpoint_tensors(Path(folder), dtype=dtype, release=release)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return model, config, tensors
