"""Mixtral: LLaMA's attention with experts in place of the MLP.

Sources: tensorrt_llm/models/llama/{model,config,convert}.py, 0.8.0.dev2024013000 to 0.16.0.dev2024121000. The two old
keys for the experts are written; from 0.11 on the class makes `moe` of them.
"""

from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant
from porting_kit.architectures.fragments import (
    EXPERT_SWITCHES,
    LAYER,
    TARGET,
    dense,
    experts,
    named_by_release,
    recomputed_frequencies,
    separate_qkv,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures={"MixtralForCausalLM": "MixtralForCausalLM"},
    model_folder="llama",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *named_by_release(
            experts(f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.block_sparse_moe.experts", names=("w1", "w3", "w2"))
        ),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="experts",
    qkv="separate",
    switches=EXPERT_SWITCHES,
    defaults={"norm_eps": 1e-5, "activation": "silu", "tied": False, "rope_base": 1e6},
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("attn_bias", False, "Mixtral has none"),
        constant("mlp_bias", False, "Mixtral has none"),
        constant("residual_mlp", False, "only Arctic has one"),
        attribute("moe_num_experts", "num_experts"),
        attribute("moe_top_k", "experts_per_token"),
        constant("moe_normalization_mode", 1, "the weights of the chosen experts add up to one"),
        constant("moe_tp_mode", 2, "experts are split over the ranks inside, not among them (0.10)"),
    ),
    requirements=(
        Requirement(
            "hidden_act",
            ("silu",),
            "silu",
            "experts are gated by silu",
            "tensorrt_llm/models/llama/config.py 0.13.0.dev2024090300",
        ),
    ),
    pipeline=True,
    head_size_since="0.10.0.dev2024043000",
)
