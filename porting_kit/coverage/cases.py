"""The variants of every family: which settings of a model take another path through a tree's code or our rules."""

from __future__ import annotations

import importlib
from typing import Any

from porting_kit.coverage import foreign_models as foreign
from porting_kit.coverage.reference_models import Defect, ModelSize, ReferenceCase, make_config, rope_settings


def _modern(size: ModelSize, **more: Any) -> dict[str, Any]:
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


def _ungrouped(size: ModelSize, **more: Any) -> dict[str, Any]:
    """The same with as many key/value heads as query heads."""
    heads = size.heads // 2
    return _modern(size, **{"num_attention_heads": heads, "num_key_value_heads": heads, **more})


def _early(size: ModelSize, **more: Any) -> dict[str, Any]:
    """Config keys in the spelling of GPT-2 and its like."""
    sizes = {"vocab_size": size.vocab, "n_embd": size.hidden_size, "n_layer": size.layers, "n_head": size.heads // 2}
    return {**sizes, "n_positions": size.positions, **more}


def _falcon(size: ModelSize, **more: Any) -> Any:
    sizes = {"hidden_size": size.hidden_size, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    return make_config("Falcon", **sizes, vocab_size=size.vocab, ffn_hidden_size=4 * size.hidden_size, **more)


def _mpt(size: ModelSize, **attention: Any) -> Any:
    sizes = {"d_model": size.hidden_size, "n_heads": size.heads // 2, "n_layers": size.layers}
    attention = {"attn_impl": "torch", "alibi": True, **attention}
    return make_config("Mpt", **sizes, vocab_size=size.vocab, max_seq_len=size.positions, attn_config=attention)


def _opt(size: ModelSize, **more: Any) -> Any:
    sizes = {"hidden_size": size.hidden_size, "num_hidden_layers": size.layers, "ffn_dim": size.inner}
    sizes |= {"num_attention_heads": size.heads // 2, "max_position_embeddings": size.positions}
    return make_config("OPT", **{**sizes, "vocab_size": size.vocab, "word_embed_proj_dim": size.hidden_size, **more})


def _dbrx(size: ModelSize) -> Any:
    return make_config(
        "Dbrx",
        **{"d_model": size.hidden_size, "n_heads": size.heads, "n_layers": size.layers, "vocab_size": size.vocab},
        max_seq_len=size.positions,
        attn_config={"kv_n_heads": size.kv_heads, "clip_qkv": 8.0, "rope_theta": 50000.0},
        ffn_config={
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": size.experts_chosen,
            "hidden_size": size.hidden_size,
        },
    )


def _experts(size: ModelSize, **more: Any) -> Any:
    sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96, "num_experts": 4}
    return make_config(
        "Qwen2Moe", **_modern(size, **sizes, num_experts_per_tok=size.experts_chosen, **rope_settings()), **more
    )


def _experts3(size: ModelSize) -> Any:
    sizes = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "norm_topk_prob": True}
    return make_config("Qwen3Moe", **_modern(size, **sizes, num_experts_per_tok=size.experts_chosen, **rope_settings()))


def _gemma3(size: ModelSize) -> Any:
    kinds = ("full_attention", "sliding_attention")
    rope = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 50000.0} for kind in kinds}}
    heads = {"head_dim": 16, "query_pre_attn_scalar": 24}
    return make_config("Gemma3Text", **{**_modern(size, **heads, **rope), **TIED})


def _glm(size: ModelSize, **rope: Any) -> Any:
    rotary = rope_settings(**{"theta": 500000.0, "partial_rotary_factor": 0.5, **rope})
    head = {"head_dim": size.hidden_size // size.heads, "attention_bias": True, "pad_token_id": 0}
    return make_config("Glm", **_modern(size, **head, **rotary))


def _forget_attention_factor(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.0


TIED = {"tie_word_embeddings": True}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
PHIMOE_BIASES = {"attention_bias": True, "lm_head_bias": True}
LONG = {"kind": "longrope", "theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.5, 2.5, 3.5, 6.0]}
NO_FACTOR = Defect(
    "long rope's attention factor is 1.0 instead of sqrt(1 + ln s / ln L) (phi3/model.py, 0.11.0.dev2024062500)",
    until="0.12.0.dev2024070200",
    give=_forget_attention_factor,
)
BAICHUAN_1 = ModelSize(vocab=64000)  # by which Baichuan 1 is told from 2
GEMMA_SIZE = ModelSize(vocab=164)  # its embedding is split over the ranks and not padded


def _case(name: str, family: str, make: Any, **more: Any) -> ReferenceCase:
    return ReferenceCase(name, family, make, **more)


def _plain(name: str, family: str, place: str, **more: Any) -> ReferenceCase:
    """A model of our own in plain PyTorch, by module and class; its module is imported when the model is made."""
    module, class_name = place.split(".")

    def make_model(size: ModelSize) -> Any:
        return getattr(importlib.import_module(f"porting_kit.coverage.{module}"), class_name)(size)

    return _case(name, family, lambda size: size, make_model=make_model, relative="plain PyTorch", **more)


CASES: tuple[ReferenceCase, ...] = (
    _case("llama", "llama", lambda s: make_config("Llama", **_modern(s, rms_norm_eps=1e-3, **rope_settings()))),
    _case(
        "llama, biases, tied embeddings",
        "llama",
        lambda s: make_config(
            "Llama",
            **_modern(s, attention_bias=True, mlp_bias=True, **TIED, **rope_settings()),
        ),
    ),
    _case("llama, head_dim", "llama", lambda s: make_config("Llama", **_modern(s, head_dim=16, **rope_settings()))),
    _case(
        "llama, linear rope scaling",
        "llama",
        lambda s: make_config("Llama", **_modern(s, **rope_settings(kind="linear", factor=4.0))),
    ),
    _case(
        "llama, llama3 rope scaling",
        "llama",
        lambda s: make_config("Llama", **_modern(s, **rope_settings(5e5, **LLAMA3))),
    ),
    _case(
        "mistral",
        "llama",
        lambda s: make_config("Mistral", **_modern(s, sliding_window=None, **rope_settings())),
        hugging_face_class="MistralForCausalLM",
    ),
    _case(
        "internlm",
        "llama",
        lambda s: make_config("Llama", **_modern(s, attention_bias=True, **rope_settings())),
        rename=foreign.as_internlm,
        hugging_face_class="InternLMForCausalLM",
        relative="LLaMA with biases, re-expressed",
    ),
    _case(
        "internlm2",
        "internlm2",
        lambda s: make_config("Llama", **_modern(s, **rope_settings())),
        rename=foreign.as_internlm2,
        relative="LLaMA, re-expressed",
    ),
    _case(
        "mixtral",
        "mixtral",
        lambda s: make_config(
            "Mixtral",
            **_modern(
                s, num_local_experts=4, num_experts_per_tok=s.experts_chosen, sliding_window=None, **rope_settings()
            ),
        ),
    ),
    _case(
        "qwen",
        "qwen",
        lambda s: make_config("Qwen2", **_ungrouped(s, **rope_settings())),
        rename=foreign.as_qwen,
        relative="Qwen2, re-expressed",
    ),
    _case("qwen2", "qwen2", lambda s: make_config("Qwen2", **_modern(s, **rope_settings(1e6)))),
    _case("qwen2_moe", "qwen2_moe", _experts),
    _case("qwen3", "qwen3", lambda s: make_config("Qwen3", **_modern(s, head_dim=16, **rope_settings()))),
    _case("qwen3_moe", "qwen3_moe", _experts3),
    _case(
        "deepseek_v1",
        "deepseek_v1",
        lambda s: _experts(s, mlp_only_layers=[0]),
        prepare=foreign.plain_experts,
        rename=foreign.as_deepseek,
        relative="Qwen2-MoE, re-expressed",
    ),
    _case(
        "bloom",
        "bloom",
        lambda s: make_config(
            "Bloom", hidden_size=s.hidden_size, n_layer=s.layers, n_head=s.heads // 2, vocab_size=s.vocab
        ),
    ),
    _case("gpt2", "gpt2", lambda s: make_config("GPT2", **_early(s)), learned_positions=True),
    _case(
        "gpt_bigcode, multi-query",
        "gpt_bigcode",
        lambda s: make_config("GPTBigCode", **_early(s)),
        learned_positions=True,
    ),
    _case("gpt_bigcode, all heads", "gpt_bigcode", lambda s: make_config("GPTBigCode", **_early(s, multi_query=False))),
    _case(
        "starcoder2",
        "starcoder2",
        lambda s: make_config("Starcoder2", **_modern(s, sliding_window=None, **rope_settings())),
    ),
    _case(
        "nemotron",
        "nemotron",
        lambda s: make_config(
            "Nemotron", **_modern(s, head_dim=s.hidden_size // s.heads, **rope_settings(partial_rotary_factor=0.5))
        ),
    ),
    _case(
        "persimmon",
        "persimmon",
        lambda s: make_config("Persimmon", **_ungrouped(s, **rope_settings(25000.0, partial_rotary_factor=0.5))),
    ),
    _case("gptj", "gptj", lambda s: make_config("GPTJ", **_early(s, rotary_dim=8))),
    _case(
        "gptneox, rope base 30000",
        "gptneox",
        lambda s: make_config(
            "GPTNeoX",
            **_ungrouped(s, intermediate_size=4 * s.hidden_size, **rope_settings(30000.0, partial_rotary_factor=0.25)),
        ),
    ),
    _case("opt, norms before", "opt", _opt, learned_positions=True),
    _case("opt, norms after", "opt", lambda s: _opt(s, do_layer_norm_before=False)),
    _case(
        "opt, projection in and out",
        "opt",
        lambda s: _opt(s, do_layer_norm_before=False, word_embed_proj_dim=s.hidden_size // 2),
    ),
    _case("falcon 7B", "falcon", lambda s: _falcon(s, multi_query=True), attention="sdpa"),
    _case("falcon, biases", "falcon", lambda s: _falcon(s, multi_query=True, bias=True), attention="sdpa"),
    _case(
        "falcon 40B",
        "falcon",
        lambda s: _falcon(s, new_decoder_architecture=True, num_kv_heads=s.kv_heads),
        attention="sdpa",
    ),
    _case(
        "falcon2",
        "falcon",
        lambda s: _falcon(s, new_decoder_architecture=True, num_kv_heads=s.kv_heads, num_ln_in_parallel_attn=1),
        attention="sdpa",
    ),
    _case(
        "falcon RW, ALiBi",
        "falcon",
        lambda s: _falcon(s, multi_query=False, alibi=True, parallel_attn=False, bias=True),
        attention="sdpa",
    ),
    _case("mpt", "mpt", _mpt),
    _case("mpt, clipped", "mpt", lambda s: _mpt(s, clip_qkv=1.0)),
    _case("phi", "phi", lambda s: make_config("Phi", **_ungrouped(s, **rope_settings(partial_rotary_factor=0.5)))),
    _case(
        "exaone",
        "exaone",
        lambda s: make_config("Llama", **_modern(s, **rope_settings())),
        rename=foreign.as_exaone,
        relative="LLaMA, re-expressed",
    ),
    _case(
        "phimoe",
        "phimoe",
        lambda s: make_config("Phimoe", **_modern(s, **PHIMOE, **PHIMOE_BIASES, **rope_settings())),
    ),
    _case(
        "phimoe, no biases",
        "phimoe",
        lambda s: make_config("Phimoe", **_modern(s, **PHIMOE, **rope_settings())),
    ),
    _plain("phi3_small, no blocks", "phi3_small", "scaled_decoders.Phi3Small"),
    _plain("phi3_small", "phi3_small", "scaled_decoders.Phi3Small", edit_config={"dense_attention_every_n_layers": 2}),
    _plain("jais", "jais", "scaled_decoders.Jais"),
    _plain("grok", "grok", "plain_decoders.Grok"),
    _plain("arctic", "arctic", "plain_decoders.Arctic"),
    _plain("nemotron_nas, parts left out and linear", "nemotron_nas", "uneven_decoders.NemotronNas"),
    _plain("deci, key/value heads by layer", "nemotron_nas", "uneven_decoders.DeciLM"),
    _case("phi3", "phi3", lambda s: make_config("Phi3", **_modern(s, pad_token_id=0, **rope_settings()))),
    _case(
        "phi3, long rope",
        "phi3",
        lambda s: make_config(
            "Phi3",
            **_modern(s, pad_token_id=0, original_max_position_embeddings=32, **rope_settings(**LONG)),
        ),
        defect=NO_FACTOR,
    ),
    _case(
        "gemma",
        "gemma",
        lambda s: make_config("Gemma", **_modern(s, head_dim=16, **TIED, **rope_settings())),
        size=GEMMA_SIZE,
    ),
    _case(
        "gemma2",
        "gemma2",
        lambda s: make_config("Gemma2", **_modern(s, head_dim=16, query_pre_attn_scalar=24, **TIED, **rope_settings())),
        size=GEMMA_SIZE,
    ),
    _case("gemma3", "gemma3", _gemma3, size=GEMMA_SIZE),
    _case("dbrx", "dbrx", _dbrx),
    _case(
        "cohere",
        "cohere",
        lambda s: make_config("Cohere", **_modern(s, logit_scale=0.25, **TIED, **rope_settings())),
    ),
    _case(
        "cohere, normed queries and keys",
        "cohere",
        lambda s: make_config("Cohere", **_modern(s, use_qk_norm=True, **TIED, **rope_settings())),
    ),
    _case(
        "baichuan 7B",
        "baichuan",
        lambda s: make_config("Llama", **_ungrouped(s, **rope_settings(10000.0))),
        rename=foreign.as_baichuan,
        relative="LLaMA, re-expressed",
        size=BAICHUAN_1,
    ),
    _case(
        "baichuan2 7B, normalised output",
        "baichuan",
        lambda s: make_config("Llama", **_ungrouped(s, **rope_settings(10000.0))),
        prepare=foreign.scale_output_rows_to_one,
        rename=foreign.as_baichuan2,
        relative="LLaMA, re-expressed",
    ),
    _case(
        "baichuan2 13B, ALiBi",
        "baichuan",
        lambda s: make_config("Llama", **_ungrouped(s, **rope_settings(10000.0))),
        make_model=foreign.make_alibi_llama,
        prepare=foreign.scale_output_rows_to_one,
        rename=foreign.as_baichuan_13b,
        relative="LLaMA with ALiBi, re-expressed",
    ),
    _case("chatglm3", "chatglm", _glm, rename=foreign.as_chatglm, relative="GLM, re-expressed"),
    _case(
        "glm4",
        "chatglm",
        _glm,
        rename=foreign.as_chatglm,
        relative="GLM, re-expressed",
        edit_config={"_name_or_path": "THUDM/glm-4-9b"},
    ),
    _case(
        "chatglm2, linear rope ratio",
        "chatglm",
        lambda s: _glm(s, theta=10000.0, kind="linear", factor=4.0),
        rename=foreign.as_chatglm,
        relative="GLM, re-expressed",
        edit_config={"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 4},
    ),
)

# Families that have rules and no random model here: family -> why.
WITHOUT_REFERENCE: dict[str, str] = {}
