"""Qwen 1.5, 2 and 2.5: LLaMA's layout with biases on queries, keys and values and none on the output projection.

Sources: tensorrt_llm/models/qwen/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300.
"""

from porting_kit.architectures.families.llama import (
    ATTENTION_RULES,
    INVERSE_FREQUENCIES,
    MLP_RULES,
    NORM_RULES,
    OUTER_RULES,
    QKV_BIAS,
)
from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, constant, switch

MODEL = "tensorrt_llm/models/qwen/model.py 0.11.0.dev2024062500"

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures={"Qwen2ForCausalLM": "Qwen2ForCausalLM"},
    model_folder="qwen",
    rules=(*OUTER_RULES, *ATTENTION_RULES, QKV_BIAS, *MLP_RULES, *NORM_RULES),
    drops=(INVERSE_FREQUENCIES,),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={
        "attention_bias": Switch(default=True),
        "mlp_bias": Switch(default=False),
    },
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "attention_bias"),
        switch("mlp_bias"),
        constant("qwen_type", "qwen2", "the class chooses its layout by it"),
        constant("moe_intermediate_size", 0, "no experts"),
        constant("moe_shared_expert_intermediate_size", 0, "no experts"),
    ),
    requirements=(
        Requirement("use_sliding_window", (False,), False, "the class has no per-layer sliding window", MODEL),
    ),
    handled_keys=("qwen_type", "max_window_layers", "layer_types", "sliding_window"),
    pipeline=True,
    first_release="0.9.0",
)
