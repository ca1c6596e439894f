"""Tiny random Hugging Face models of every family, saved as users have them, each with its own reference.

Families whose code is not part of transformers (Qwen 1, InternLM 2, Baichuan, ChatGLM, DeepSeek MoE) are made from a
relative that is: the reference runs the relative, the saved folder holds its tensors under the family's own names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from porting_kit.coverage import cases as coverage_cases
from porting_kit.coverage.plain_decoders import Grok
from porting_kit.coverage.reference_models import ModelSize, make_reference, save_reference

E, L, H, K, V, I, S = 64, 2, 8, 2, 161, 128, 128  # noqa: E741 - the letters of the package
LIKE_LLAMA = {
    "hidden_size": E,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "intermediate_size": I,
    "vocab_size": V,
    "max_position_embeddings": S,
}
LIKE_GPT2 = {"n_embd": E, "n_layer": L, "n_head": 4, "vocab_size": V, "n_positions": S}
FULL_HEADS = {**LIKE_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4}


@dataclass(frozen=True)
class EditedClass:
    """A later class made from the one of 0.16.0.dev2024121000, the newest tree the project was checked with.

    Args:
        architecture: name under which that tree knows the class's config.
        class_name: name of the class.
        edits: (text, replacement) in its model.py; each text is there exactly once.
    """

    architecture: str
    class_name: str
    edits: tuple[tuple[str, str], ...]
    release: str = "0.16.0.dev2024121000"


@dataclass(frozen=True)
class TinyCase:
    """One model.

    Args:
        family: the family it must be recognised as.
        make_config: the relative's transformers config; None for Grok, which has a reference of its own.
        rename: (tensors, config dict) of the relative -> those of the family; None saves the relative itself.
        attention: transformers' attention implementation of the reference.
        edit_reference: changes the reference so that it computes what TensorRT-LLM computes by design.
        since: releases before this one differ by design.
        prepare: changes the model before it is saved.
        covered: the variant of `porting_kit.coverage` that serves here as well.
        edited: for families newer than any tree at hand: how the class of an older release becomes theirs.
    """

    family: str
    make_config: Callable[[], Any] | None
    rename: Callable[[dict, dict], tuple[dict, dict]] | None = None
    attention: str = "eager"
    edit_reference: Callable[[Any], None] | None = None
    since: str | None = None
    prepare: Callable[[Any], None] | None = None
    edited: EditedClass | None = None
    covered: str | None = None


def save_tiny(case: TinyCase, folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Write the model to `folder` and return the reference, in float32, on the weights as saved."""
    if case.covered is not None:
        covered = next(each for each in coverage_cases.CASES if each.name == case.covered)
        model = make_reference(covered).to(dtype).float()
        save_reference(covered, model, folder)
        return model
    if case.make_config is None:
        model = Grok(ModelSize())
        model.save_pretrained(folder)
        return model
    torch.manual_seed(0)
    config = case.make_config()
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model)
    if case.prepare is not None:
        case.prepare(model)
    model.to(dtype).save_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=case.attention, dtype=torch.float32
    ).eval()
    if case.edit_reference is not None:
        case.edit_reference(reference)
    if case.rename is not None:
        tensors, raw = case.rename(
            load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        )
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw))
    return reference


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that every layer matters, every bias and norm weight different from its start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1 and name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif weight.dim() == 1 or "norm" in name:
                weight.add_(0.2 * noise)
            else:
                embedding = any(part in name for part in ("embed", "wte", "wpe", "tok_"))
                weight.copy_(noise * (1.0 if embedding else weight.shape[-1] ** -0.5))


def reference_logits(reference: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of one prompt [S] in one pass."""
    with torch.no_grad():
        return reference(tokens[None]).logits[0].float()


def _use_tanh(reference: torch.nn.Module) -> None:
    """MPT names no activation in its config: put the tanh form of GELU in place of the erf form."""
    for module in reference.modules():
        if isinstance(getattr(module, "act", None), torch.nn.GELU):
            module.act = torch.nn.GELU(approximate="tanh")


def _moved(tensors: dict, table: dict[str, str]) -> dict:
    """Rename by replacing parts of names."""
    moved = {}
    for name, tensor in tensors.items():
        for old, new in table.items():
            name = name.replace(old, new)
        moved[name] = tensor
    return moved


def _joined(tensors: dict, parts: tuple[str, ...], target: str) -> dict:
    """Replace tensors that differ in one part of the name by their concatenation along dimension 0."""
    joined = dict(tensors)
    for name in list(tensors):
        if f".{parts[0]}." in name:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            joined[name.replace(f".{parts[0]}.", f".{target}.")] = torch.cat([joined.pop(n) for n in names])
    return joined


def _as_qwen(tensors: dict, raw: dict) -> tuple[dict, dict]:
    tensors = _joined(tensors, ("q_proj", "k_proj", "v_proj"), "c_attn")
    table = {"model.layers.": "transformer.h.", "self_attn.o_proj": "attn.c_proj", "self_attn": "attn"}
    table |= {"mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
    table |= {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    table |= {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    keys = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "rotary_emb_base": 50000.0, "no_bias": True}
    keys |= {"layer_norm_epsilon": raw["rms_norm_eps"], "intermediate_size": 2 * I, "kv_channels": E // 4}
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    return _moved(tensors, table), keys | {key: raw[key] for key in kept}


def _as_internlm2(tensors: dict, raw: dict) -> tuple[dict, dict]:
    def by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = [x.reshape(K, -1, E // H, E) for x in (q, k, v)]
        return torch.cat(groups, dim=1).reshape(-1, E)

    for layer in range(L):
        attention = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{attention}.{n}_proj.weight") for n in "qkv"]
        tensors[f"{attention}.wqkv.weight"] = by_group(*parts)
    table = {"self_attn.o_proj": "attention.wo", "self_attn": "attention", "mlp.gate_proj": "feed_forward.w1"}
    table |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "lm_head": "output"}
    table |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    table |= {"model.embed_tokens": "model.tok_embeddings"}
    raw |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    return _moved(tensors, table), raw


def _as_baichuan(tensors: dict, raw: dict) -> tuple[dict, dict]:
    raw |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": V}
    return _joined(tensors, ("q_proj", "k_proj", "v_proj"), "W_pack"), raw


def _unit_rows(model: torch.nn.Module) -> None:
    """Baichuan 2 multiplies by the output matrix's rows scaled to length one."""
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))


def _as_baichuan2(tensors: dict, raw: dict) -> tuple[dict, dict]:
    lengths = 1 + torch.arange(V)[:, None] % 7  # what normalising takes away again
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * lengths
    return _as_baichuan(tensors, raw)


def _as_chatglm(tensors: dict, raw: dict) -> tuple[dict, dict]:
    tensors = _joined(tensors, ("q_proj", "k_proj", "v_proj"), "query_key_value")
    table = {"model.layers.": "transformer.encoder.layers.", "self_attn.o_proj": "self_attention.dense"}
    table |= {"self_attn": "self_attention", "mlp.gate_up_proj": "mlp.dense_h_to_4h"}
    table |= {"mlp.down_proj": "mlp.dense_4h_to_h", "model.norm": "transformer.encoder.final_layernorm"}
    table |= {"model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer"}
    keys = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": L, "hidden_size": E}
    keys |= {"ffn_hidden_size": I, "kv_channels": E // H, "num_attention_heads": H, "multi_query_attention": True}
    keys |= {"multi_query_group_num": K, "padded_vocab_size": V, "vocab_size": V, "seq_length": S, "rmsnorm": True}
    keys |= {"layernorm_epsilon": raw["rms_norm_eps"], "add_bias_linear": False, "add_qkv_bias": True}
    keys |= {"rope_ratio": 50, "_name_or_path": "THUDM/chatglm3-6b-128k", "tie_word_embeddings": False}
    return _moved(tensors, table), keys


def _plain_experts(model: torch.nn.Module) -> None:
    """Make Qwen 2 MoE compute what DeepSeek MoE does: no biases, the shared expert's gate at one half."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias") or "shared_expert_gate" in name:
                weight.zero_()


def _as_deepseek(tensors: dict, raw: dict) -> tuple[dict, dict]:
    kept = {n: t for n, t in tensors.items() if not n.endswith("_proj.bias") and "shared_expert_gate" not in n}
    for name in kept:
        if "shared_expert.down_proj" in name:
            kept[name] = kept[name] / 2
    raw |= {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_shared_experts": 2}
    raw |= {"n_routed_experts": raw.pop("num_experts"), "first_k_dense_replace": 1, "moe_layer_freq": 1}
    for key in ("mlp_only_layers", "decoder_sparse_step", "shared_expert_intermediate_size"):
        raw.pop(key)
    return _moved(kept, {"shared_expert.": "shared_experts."}), raw


def _falcon(**changes: Any) -> Any:
    sizes = {"hidden_size": E, "num_hidden_layers": L, "num_attention_heads": H, "vocab_size": V}
    return transformers.FalconConfig(**sizes, ffn_hidden_size=4 * E, activation="gelu_pytorch_tanh", **changes)


def _mpt(**attention: Any) -> Any:
    attention = {"attn_impl": "torch", "alibi": True, **attention}
    return transformers.MptConfig(d_model=E, n_heads=4, n_layers=L, vocab_size=V, max_seq_len=S, attn_config=attention)


def _dbrx() -> Any:
    return transformers.DbrxConfig(
        d_model=E,
        n_heads=H,
        n_layers=L,
        max_seq_len=S,
        vocab_size=V,
        attn_config={"kv_n_heads": K, "clip_qkv": 8.0, "rope_theta": 50000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    )


def _rope(theta: float = 50000.0, kind: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


LLAMA3_ROPE = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_MOE = {
    **LIKE_LLAMA,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LONG_ROPE = {"kind": "longrope", "theta": 10000.0, "short_factor": [1.1] * 4, "long_factor": [4.0] * 4}
OPT = {"hidden_size": E, "num_hidden_layers": L, "num_attention_heads": 4, "ffn_dim": I, "vocab_size": V}
OPT |= {"max_position_embeddings": S, "word_embed_proj_dim": E}

NORMED_QUERIES = "qk_layernorm=True, layernorm_type=LayerNormType.RmsNorm, eps=1e-6"
QWEN3_CLASS = EditedClass(
    "Qwen2ForCausalLM",
    "QWenForCausalLM",
    (
        ("dense_bias=False)", f"dense_bias=False, {NORMED_QUERIES})"),
        ("from ...functional import Tensor, recv, send", "from ...functional import LayerNormType, Tensor, recv, send"),
    ),
)
EXPERTS_WIDTH = ("self.config.qwen_type == 'qwen2_moe':\n            intermediate", "True:\n            intermediate")
CASES: dict[str, TinyCase] = {
    "bloom": TinyCase("bloom", lambda: transformers.BloomConfig(hidden_size=E, n_layer=L, n_head=4, vocab_size=V)),
    "gptneox": TinyCase(
        "gptneox",
        lambda: transformers.GPTNeoXConfig(
            **{**FULL_HEADS, "intermediate_size": 4 * E},
            hidden_act="gelu_new",
            **_rope(30000.0, partial_rotary_factor=0.25),
        ),
    ),
    "llama": TinyCase("llama", lambda: transformers.LlamaConfig(**LIKE_LLAMA, rms_norm_eps=1e-3, **_rope())),
    "llama-biases-tied": TinyCase(
        "llama",
        lambda: transformers.LlamaConfig(
            **LIKE_LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **_rope()
        ),
    ),
    "llama-wide-heads": TinyCase("llama", lambda: transformers.LlamaConfig(**LIKE_LLAMA, head_dim=16, **_rope())),
    "llama-linear-rope": TinyCase(
        "llama", lambda: transformers.LlamaConfig(**LIKE_LLAMA, **_rope(kind="linear", factor=4.0))
    ),
    "llama-llama3-rope": TinyCase("llama", lambda: transformers.LlamaConfig(**LIKE_LLAMA, **_rope(**LLAMA3_ROPE))),
    "mistral": TinyCase("llama", lambda: transformers.MistralConfig(**LIKE_LLAMA, sliding_window=None, **_rope())),
    "internlm2": TinyCase("internlm2", lambda: transformers.LlamaConfig(**LIKE_LLAMA, **_rope()), _as_internlm2),
    "mixtral": TinyCase(
        "mixtral",
        lambda: transformers.MixtralConfig(
            **{**LIKE_LLAMA, "intermediate_size": 48}, num_local_experts=4, num_experts_per_tok=2, **_rope()
        ),
    ),
    "qwen": TinyCase("qwen", lambda: transformers.Qwen2Config(**FULL_HEADS, **_rope()), _as_qwen),
    "qwen2": TinyCase("qwen2", lambda: transformers.Qwen2Config(**LIKE_LLAMA, **_rope(1e6))),
    "qwen2_moe": TinyCase("qwen2_moe", lambda: transformers.Qwen2MoeConfig(**QWEN_MOE, **_rope())),
    "deepseek_v1": TinyCase(
        "deepseek_v1",
        lambda: transformers.Qwen2MoeConfig(**QWEN_MOE, mlp_only_layers=[0], **_rope()),
        _as_deepseek,
        prepare=_plain_experts,
    ),
    "qwen3": TinyCase(
        "qwen3", lambda: transformers.Qwen3Config(**LIKE_LLAMA, head_dim=16, **_rope()), edited=QWEN3_CLASS
    ),
    "qwen3_moe": TinyCase(
        "qwen3_moe",
        lambda: transformers.Qwen3MoeConfig(
            **LIKE_LLAMA,
            head_dim=16,
            moe_intermediate_size=48,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            **_rope(),
        ),
        edited=replace(QWEN3_CLASS, edits=(*QWEN3_CLASS.edits, EXPERTS_WIDTH)),
    ),
    "gpt2": TinyCase("gpt2", lambda: transformers.GPT2Config(**LIKE_GPT2)),
    "gpt_bigcode": TinyCase("gpt_bigcode", lambda: transformers.GPTBigCodeConfig(**LIKE_GPT2)),
    "gpt_bigcode-all-heads": TinyCase(
        "gpt_bigcode", lambda: transformers.GPTBigCodeConfig(**LIKE_GPT2, multi_query=False)
    ),
    "starcoder2": TinyCase(
        "starcoder2", lambda: transformers.Starcoder2Config(**LIKE_LLAMA, sliding_window=None, **_rope())
    ),
    "nemotron": TinyCase(
        "nemotron",
        lambda: transformers.NemotronConfig(**LIKE_LLAMA, head_dim=8, **_rope(partial_rotary_factor=0.5)),
    ),
    "persimmon": TinyCase(
        "persimmon",
        lambda: transformers.PersimmonConfig(
            **{k: v for k, v in FULL_HEADS.items() if k != "num_key_value_heads"},
            **_rope(25000.0, partial_rotary_factor=0.5),
        ),
    ),
    "gptj": TinyCase("gptj", lambda: transformers.GPTJConfig(**LIKE_GPT2, rotary_dim=8)),
    "opt": TinyCase("opt", lambda: transformers.OPTConfig(**OPT)),
    "opt-norms-after": TinyCase("opt", lambda: transformers.OPTConfig(**OPT, do_layer_norm_before=False)),
    # transformers' eager Falcon adds ALiBi twice; its sdpa path is right
    "falcon-7b": TinyCase("falcon", lambda: _falcon(multi_query=True), attention="sdpa"),
    "falcon-7b-biases": TinyCase("falcon", lambda: _falcon(multi_query=True, bias=True), attention="sdpa"),
    "falcon-40b": TinyCase("falcon", lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2), attention="sdpa"),
    "falcon-2": TinyCase(
        "falcon",
        lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
        attention="sdpa",
        since="0.15.0.dev2024101500",
    ),
    "falcon-rw": TinyCase(
        "falcon", lambda: _falcon(multi_query=False, alibi=True, parallel_attn=False, bias=True), attention="sdpa"
    ),
    "mpt": TinyCase("mpt", _mpt, edit_reference=_use_tanh),
    "mpt-clipped": TinyCase("mpt", lambda: _mpt(clip_qkv=1.0), edit_reference=_use_tanh),
    "phi": TinyCase("phi", lambda: transformers.PhiConfig(**FULL_HEADS, **_rope(partial_rotary_factor=0.5))),
    "phi3": TinyCase("phi3", lambda: transformers.Phi3Config(**LIKE_LLAMA, pad_token_id=0, **_rope())),
    "phi3-long-rope": TinyCase(
        "phi3",
        lambda: transformers.Phi3Config(
            **{**LIKE_LLAMA, "max_position_embeddings": 256},
            pad_token_id=0,
            original_max_position_embeddings=S,
            **_rope(**LONG_ROPE),
        ),
        since="0.12.0.dev2024070200",
    ),
    "gemma": TinyCase("gemma", lambda: transformers.GemmaConfig(**LIKE_LLAMA, head_dim=16, **_rope())),
    "gemma2": TinyCase(
        "gemma2",
        lambda: transformers.Gemma2Config(**LIKE_LLAMA, head_dim=16, query_pre_attn_scalar=24, **_rope()),
    ),
    "grok": TinyCase("grok", None),
    "arctic": TinyCase("arctic", None, covered="arctic"),
    "exaone": TinyCase("exaone", None, covered="exaone"),
    "jais": TinyCase("jais", None, covered="jais"),
    "nemotron_nas": TinyCase("nemotron_nas", None, covered="nemotron_nas, parts left out and linear"),
    "phi3_small": TinyCase("phi3_small", None, covered="phi3_small, no blocks"),
    "phimoe": TinyCase("phimoe", None, covered="phimoe"),
    # one rotary base and no short window, so that the older class computes the same; both are told apart by the config
    "gemma3": TinyCase(
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **LIKE_LLAMA,
            head_dim=16,
            query_pre_attn_scalar=24,
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 50000.0}
                for kind in ("full_attention", "sliding_attention")
            },
        ),
        edited=EditedClass(
            "Gemma2ForCausalLM",
            "GemmaForCausalLM",
            (
                ("max_attn_value=max_attn_value)", f"max_attn_value=max_attn_value, {NORMED_QUERIES})"),
                ("config.attn_logit_softcapping or 0.0", "0.0"),
            ),
        ),
    ),
    "dbrx": TinyCase("dbrx", _dbrx),
    "cohere": TinyCase("cohere", lambda: transformers.CohereConfig(**LIKE_LLAMA, **_rope())),
    "cohere-normed-queries": TinyCase(
        "cohere", lambda: transformers.CohereConfig(**LIKE_LLAMA, use_qk_norm=True, **_rope())
    ),
    "cohere-normed-all-heads": TinyCase(
        "cohere", lambda: transformers.CohereConfig(**FULL_HEADS, use_qk_norm=True, **_rope())
    ),
    "baichuan": TinyCase(
        "baichuan",
        lambda: transformers.LlamaConfig(**FULL_HEADS, **_rope(10000.0)),
        _as_baichuan2,
        prepare=_unit_rows,
    ),
    "chatglm": TinyCase(
        "chatglm",
        lambda: transformers.GlmConfig(
            **LIKE_LLAMA,
            head_dim=E // H,
            attention_bias=True,
            pad_token_id=0,
            **_rope(500000.0, partial_rotary_factor=0.5),
        ),
        _as_chatglm,
    ),
}
