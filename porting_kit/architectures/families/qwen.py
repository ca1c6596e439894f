"""Qwen (the first generation): fused projection with a bias, half the stated MLP width, names of its own.

Sources: tensorrt_llm/models/qwen/{model,config,convert}.py, 0.10.0.dev2024043000 to 0.13.0.dev2024090300. `w2` is the
activated branch, `w1` the linear one; the class halves `intermediate_size` itself.
"""

from porting_kit.architectures.families.qwen2 import MODEL, QWEN_FIELDS
from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import constant, key
from porting_kit.architectures.fragments import TARGET, dense, fused_qkv, gated_mlp
from porting_kit.architectures.rules import Drop, embedding, norm, output_matrix

SOURCE = "transformer.h.{i}"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Each branch of the MLP is half as wide as the config says."""
    return {"intermediate_size": (raw["intermediate_size"] // 2, "intermediate_size / 2")}


FAMILY = Family(
    name="qwen",
    model_types=("qwen",),
    architectures={"QWenLMHeadModel": "QWenForCausalLM"},
    model_folder="qwen",
    rules=(
        embedding("transformer.wte.weight"),
        *fused_qkv(f"{SOURCE}.attn.c_attn", bias=True),
        *dense(f"{SOURCE}.attn.c_proj"),
        *gated_mlp(f"{SOURCE}.mlp", names=("w2", "w1", "c_proj")),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm"),
        *norm(f"{SOURCE}.ln_2", f"{TARGET}.post_layernorm"),
        *norm("transformer.ln_f", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    drops=(
        Drop("transformer.rotary_emb.inv_freq", "rotary frequencies are computed again from the base"),
        Drop(f"{SOURCE}.attn.masked_bias", "the causal mask is built in"),
    ),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="one matrix, Q; K; V",
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    spellings={"norm_eps": ("layer_norm_epsilon",), "max_positions": ("max_position_embeddings", "seq_length")},
    derive=derive_sizes,
    fields=(
        *(row for row in QWEN_FIELDS if row.target not in ("use_logn_attn",)),
        key("intermediate_size"),
        constant("use_logn_attn", False, "see the requirement"),
        constant("qwen_type", "qwen", "the class chooses its layout by it"),
        constant("moe_intermediate_size", 0, "no experts"),
        constant("moe_shared_expert_intermediate_size", 0, "no experts"),
    ),
    requirements=(
        Requirement("no_bias", (True,), True, "only queries, keys and values have biases", MODEL),
        Requirement("@rope_share", (1.0,), 1.0, "whole heads are rotated", MODEL),
    ),
    handled_keys=("use_dynamic_ntk", "use_logn_attn", "seq_length", "use_flash_attn"),
    pipeline=True,
    first_release="0.9.0.dev2024031900",
)
