"""Qwen 3 (dense): LLaMA's layout without biases, with RMSNorms on queries and keys.

Sources: tensorrt_llm/models/qwen/{model,config}.py after pull request 5650 (July 2025, first in 1.0). The norms of
queries and keys use the attention's own epsilon of 1e-5 there.
"""

from porting_kit.architectures.families.qwen2 import NO_WINDOW
from porting_kit.architectures.family import Difference, Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, constant, key
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, separate_qkv
from porting_kit.architectures.rules import embedding, norm, output_matrix

MODEL = "tensorrt_llm/models/qwen/model.py 1.0"
ATTENTION_RULES = (
    *separate_qkv(f"{LAYER}.self_attn"),
    *dense(f"{LAYER}.self_attn.o_proj"),
    *norm(f"{LAYER}.self_attn.q_norm", f"{TARGET}.attention.q_layernorm", size="D"),
    *norm(f"{LAYER}.self_attn.k_norm", f"{TARGET}.attention.k_layernorm", size="D"),
)
QWEN3_FIELDS = (
    *ROPE_FIELDS,
    constant("attn_bias", False, "Qwen 3 has none"),
    constant("mlp_bias", False, "Qwen 3 has none"),
    constant("qk_layernorm", True, "queries and keys are normalised"),
    key("seq_length", default=8192, note="read with use_logn_attn only"),
    constant("use_logn_attn", False, "Qwen 3 has none"),
)
QWEN3_REQUIREMENTS = (
    NO_WINDOW,
    Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
)
NORM_EPS = Difference(
    "epsilon of the norms on queries and keys",
    "1e-5 in TensorRT-LLM, rms_norm_eps (1e-6) in Hugging Face: below 1e-5 of the largest logit",
    MODEL,
)
HANDLED = ("qwen_type", "max_window_layers", "layer_types", "sliding_window")

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures={"Qwen3ForCausalLM": "Qwen3ForCausalLM"},
    model_folder="qwen",
    rules=(
        embedding("model.embed_tokens.weight"),
        *ATTENTION_RULES,
        *gated_mlp(f"{LAYER}.mlp"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False, "head_size": 128},
    fields=(
        *QWEN3_FIELDS,
        constant("qwen_type", "qwen3", "the class chooses its layout by it"),
        constant("moe_intermediate_size", 0, "no experts"),
        constant("moe_shared_expert_intermediate_size", 0, "no experts"),
    ),
    requirements=QWEN3_REQUIREMENTS,
    differences=(NORM_EPS,),
    handled_keys=HANDLED,
    pipeline=True,
    first_release="1.0.0",
    head_size_since="1.0.0",
)
