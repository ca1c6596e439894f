"""Phi-3 mini and medium: LLaMA with fused projections; the 128k models rotate with two tables of frequencies.

Sources: tensorrt_llm/models/phi3/{model,convert}.py, 0.11.0.dev2024062500 to 0.16.0.dev2024121000. The MLP's halves
are swapped: the source keeps [gate; up], TensorRT-LLM's fused activation wants [up; gate].
"""

from porting_kit.architectures.family import Difference, Family, Requirement
from porting_kit.architectures.fields import attribute, constant, key
from porting_kit.architectures.fragments import LAYER, TARGET, dense, fused_qkv, recomputed_frequencies
from porting_kit.architectures.operations import ReorderBlocks
from porting_kit.architectures.rules import GATED, ROW, embedding, norm, output_matrix, rename, transform

MODEL = "tensorrt_llm/models/phi3/model.py 0.11.0.dev2024062500"


def derive_positions(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Two tables of frequencies make it long_rope."""
    scaling = values["rope_scaling"]
    if scaling is None or scaling["type"] != "longrope":
        return {}
    return {"position_kind": ("long_rope", "rope scaling of kind longrope")}


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    architectures={"Phi3ForCausalLM": "Phi3ForCausalLM"},
    model_folder="phi3",
    rules=(
        embedding("model.embed_tokens.weight"),
        *fused_qkv(f"{LAYER}.self_attn.qkv_proj"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        transform(
            f"{LAYER}.mlp.gate_up_proj.weight [2*I,E]", f"{TARGET}.mlp.fc.weight", ReorderBlocks((1, 0)), shard=GATED
        ),
        rename(f"{LAYER}.mlp.down_proj.weight [E,I]", f"{TARGET}.mlp.proj.weight", shard=ROW),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="one matrix, Q; K; V",
    defaults={"norm_eps": 1e-5, "activation": "silu", "tied": False},
    derive=derive_positions,
    fields=(
        attribute("rotary_base", "rope_base"),
        attribute("rotary_pct", "rope_share"),
        attribute("longrope_scaling_short_factors", "rope_scaling.short_factor", optional=True),
        attribute("longrope_scaling_long_factors", "rope_scaling.long_factor", optional=True),
        key("original_max_position_embeddings", default=None, optional=True),
        constant("hidden_act", "swiglu", "the MLP is fused: the class wants the gated name of silu"),
    ),
    requirements=(
        Requirement("hidden_act", ("silu",), "silu", "the MLP is gated by silu", MODEL),
        Requirement("@rope_share", (1.0,), 1.0, "whole heads are rotated", MODEL),
    ),
    differences=(
        Difference(
            "long-rope attention factor",
            "0.11 multiplies by 1.0 where Hugging Face uses sqrt(1 + ln s / ln L): 0.17 of the largest logit",
            MODEL,
            releases="< 0.12",
            before="0.12.0.dev2024070200",
            position_kind="long_rope",
        ),
    ),
    first_release="0.10.0.dev2024050700",
)
