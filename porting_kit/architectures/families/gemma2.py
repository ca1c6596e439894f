"""Gemma 2: Gemma with norms after attention and MLP too, soft-capped logits, its own scale of the attention logits.

Sources: tensorrt_llm/models/gemma/{model,config,convert}.py, 0.12.0.dev2024080600 to 0.16.0.dev2024121000. Every
second layer has a sliding window in Hugging Face and none in TensorRT-LLM: the same within the window.
"""

from porting_kit.architectures.families.gemma import (
    GEMMA_FIELDS,
    GEMMA_REQUIREMENTS,
    GEMMA_RULES,
    GEMMA_SWITCHES,
    HANDLED,
    norm_from_one,
)
from porting_kit.architectures.family import Difference, Family
from porting_kit.architectures.fields import attribute, constant, key
from porting_kit.architectures.fragments import LAYER, TARGET, recomputed_frequencies


def derive_scale(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """The attention logits are divided by sqrt(query_pre_attn_scalar)."""
    scalar = raw.get("query_pre_attn_scalar", 256)
    return {"q_scaling": ((scalar / values["head_size"]) ** 0.5, "sqrt(query_pre_attn_scalar / D)")}


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    architectures={"Gemma2ForCausalLM": "Gemma2ForCausalLM"},
    model_folder="gemma",
    rules=(
        *GEMMA_RULES,
        norm_from_one(f"{LAYER}.pre_feedforward_layernorm", f"{TARGET}.pre_feedforward_layernorm"),
        norm_from_one(f"{LAYER}.post_feedforward_layernorm", f"{TARGET}.post_feedforward_layernorm"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches=GEMMA_SWITCHES,
    spellings={"activation": ("hidden_activation", "hidden_act")},
    defaults={
        "norm_eps": 1e-6,
        "activation": "gelu_pytorch_tanh",
        "tied": True,
        "attention_softcap": 50.0,
        "final_softcap": 30.0,
    },
    derive=derive_scale,
    fields=(
        *GEMMA_FIELDS,
        constant("inter_layernorms", True, "norms after attention and MLP too"),
        key("query_pre_attn_scalar", default=256),
        attribute("attn_logit_softcapping", "attention_softcap"),
        attribute("final_logit_softcapping", "final_softcap"),
    ),
    requirements=GEMMA_REQUIREMENTS,
    differences=(
        Difference(
            "sliding window of every second layer",
            "TensorRT-LLM's layers all see the whole past: different beyond the window",
            "tensorrt_llm/models/gemma/model.py 0.13.0.dev2024090300",
        ),
    ),
    handled_keys=HANDLED,
    pipeline=True,
    first_release="0.12.0.dev2024080600",
    head_size_since="0.12.0.dev2024080600",
    renamed=("0.13.0.dev2024081300", "GemmaForCausalLM"),
)
