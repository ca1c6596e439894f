"""Phi-3.5-MoE: Phi-3's attention with LayerNorms and biases, experts chosen one after the other by a sparse mixer.

Sources: tensorrt_llm/models/phi3/{model,config,convert}.py, 0.14.0.dev2024100100 to 0.16.0.dev2024121000. The class
always has biases in attention and on the output matrix; zeros are written where the model has none.
"""

from porting_kit.architectures.families.phi3 import derive_positions
from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import attribute, constant, key
from porting_kit.architectures.fragments import (
    LAYER,
    QKV_ROWS,
    TARGET,
    dense,
    experts,
    recomputed_frequencies,
    separate_qkv,
)
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.rules import QKV, REPLICATED, VOCABULARY, Rule, embedding, norm, output_matrix

MODEL = "tensorrt_llm/models/phi3/model.py 0.14.0.dev2024100800"
ATTENTION = f"{LAYER}.self_attn"


def zero_bias(source: str, target: str, size: str, **options: object) -> Rule:
    """A bias that the class insists on, zeros where the model has none."""
    return Rule(target, (TensorSpec(source, (size,)),), zeros_when_absent=(size,), **options)


FAMILY = Family(
    name="phimoe",
    model_types=("phimoe",),
    architectures={"PhiMoEForCausalLM": "PhiMoEForCausalLM", "PhimoeForCausalLM": "PhiMoEForCausalLM"},
    model_folder="phi3",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(ATTENTION, bias="attention_bias"),
        zero_bias(f"{ATTENTION}.qkv.bias", f"{TARGET}.attention.qkv.bias", QKV_ROWS, shard=QKV, when="!attention_bias"),
        *dense(f"{ATTENTION}.o_proj"),
        zero_bias(f"{ATTENTION}.o_proj.bias", f"{TARGET}.attention.dense.bias", "E", shard=REPLICATED),
        *experts(f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.block_sparse_moe.experts", names=("w1", "w3", "w2")),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True),
        *norm("model.norm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
        zero_bias("lm_head.bias", "lm_head.bias", "V", shard=VOCABULARY, pipeline="last"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="layer",
    mlp="experts",
    qkv="separate",
    switches={"attention_bias": Switch(("attention_bias",), default=False)},
    defaults={"norm_eps": 1e-5, "activation": "silu", "tied": False, "rope_base": 1e6},
    derive=derive_positions,
    fields=(
        attribute("rotary_base", "rope_base"),
        attribute("rotary_pct", "rope_share"),
        attribute("longrope_scaling_short_factors", "rope_scaling.short_factor", optional=True),
        attribute("longrope_scaling_long_factors", "rope_scaling.long_factor", optional=True),
        attribute("longrope_short_mscale", "rope_scaling.short_mscale", optional=True),
        attribute("longrope_long_mscale", "rope_scaling.long_mscale", optional=True),
        key("original_max_position_embeddings", "rope_scaling.original_max_position_embeddings", None, optional=True),
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("attention_bias", True, "the class has no other form"),
        attribute("moe.num_experts", "num_experts"),
        attribute("moe.top_k", "experts_per_token"),
        constant("moe.normalization_mode", 2, "the sparse mixer"),
        key("moe.sparse_mixer_epsilon", "router_jitter_noise", 0.01),
    ),
    requirements=(
        Requirement("hidden_act", ("silu",), "silu", "experts are gated by silu", MODEL),
        Requirement("num_experts_per_tok", (2,), 2, "the sparse mixer chooses two", MODEL),
    ),
    handled_keys=("lm_head_bias", "input_jitter_noise", "router_jitter_noise", "sliding_window", "num_local_experts"),
    first_release="0.14.0.dev2024100100",
)
