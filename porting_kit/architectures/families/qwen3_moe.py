"""Qwen 3 with experts: Qwen 3's attention, experts without a shared one.

Sources: tensorrt_llm/models/qwen/{model,config}.py after pull request 6470 (August 2025, first in 1.1). Upstream's own
config never normalises the experts' weights; here `norm_topk_prob` decides, as in Hugging Face.
"""

from porting_kit.architectures.families.qwen3 import (
    ATTENTION_RULES,
    HANDLED,
    MODEL,
    NORM_EPS,
    QWEN3_FIELDS,
    QWEN3_REQUIREMENTS,
)
from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import attribute, constant, switch
from porting_kit.architectures.fragments import LAYER, TARGET, experts
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures={"Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM"},
    model_folder="qwen",
    rules=(
        embedding("model.embed_tokens.weight"),
        *ATTENTION_RULES,
        *experts(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    position="rope_gpt_neox",
    norm="rms",
    mlp="experts",
    qkv="separate",
    switches={"normalised_experts": Switch(("norm_topk_prob",), default=False)},
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False, "head_size": 128},
    fields=(
        *QWEN3_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("qwen_type", "qwen3_moe", "the class chooses its layout by it"),
        attribute("moe_num_experts", "num_experts"),
        attribute("moe_top_k", "experts_per_token"),
        switch("moe_normalization_mode", "normalised_experts", mapping={True: 1, False: 0}),
        attribute("moe_intermediate_size", "expert_size"),
        constant("moe_shared_expert_intermediate_size", 0, "no shared expert"),
    ),
    requirements=(
        *QWEN3_REQUIREMENTS,
        Requirement("decoder_sparse_step", (1,), 1, "every layer has experts", MODEL),
        Requirement("mlp_only_layers", ([],), [], "every layer has experts", MODEL),
    ),
    differences=(NORM_EPS,),
    handled_keys=HANDLED,
    pipeline=True,
    first_release="1.1.0",
    head_size_since="1.1.0",
)
