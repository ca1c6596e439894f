"""Jais: GPT-2's layout with ALiBi and a gated MLP; embeddings, attention logits and output are scaled.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.12.0.dev2024072300 to 0.16.0.dev2024121000. The scale of
the logits goes into the output matrix.
"""

from porting_kit.architectures.families.gpt2 import GPT_FIELDS, NO_ROPE
from porting_kit.architectures.family import ALIBI_SLOPES_CAST, ByKey, Family, Requirement
from porting_kit.architectures.fields import attribute, constant
from porting_kit.architectures.fragments import TARGET, built_in_masks, conv1d
from porting_kit.architectures.operations import Scale
from porting_kit.architectures.rules import COLUMN, QKV, REPLICATED, ROW, embedding, norm, output_matrix

SOURCE = "transformer.h.{i}"
MODEL = "tensorrt_llm/models/gpt/config.py 0.14.0.dev2024100800"
OWN = ("q_scaling", "embedding_scale")


def derive_scales(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Two generations of names for the same scales."""
    width = raw.get("width_scale")
    if width is None:
        width = raw.get("mup_output_alpha", 1.0) * raw.get("mup_width_scale", 1.0)
    derived = {
        "output_scale": (width, "width_scale, or mup_output_alpha * mup_width_scale"),
        "embedding_scale": (
            raw.get("embeddings_scale", raw.get("mup_embeddings_scale")),
            "embeddings_scale or mup_embeddings_scale",
        ),
    }
    if raw.get("scale_qk_dot_by_d", raw.get("mup_scale_qk_dot_by_d", False)):
        derived["q_scaling"] = (values["head_size"] ** 0.5, "scale_qk_dot_by_d")
    return derived


FAMILY = Family(
    name="jais",
    model_types=("jais",),
    architectures={"JAISLMHeadModel": "JAISLMHeadModel"},
    model_folder="gpt",
    rules=(
        embedding("transformer.wte.weight"),
        *conv1d(f"{SOURCE}.attn.c_attn", f"{TARGET}.attention.qkv", "3*E", "E", shard=QKV, bias_shard=QKV),
        *conv1d(f"{SOURCE}.attn.c_proj", f"{TARGET}.attention.dense", "E", "E", shard=ROW, bias_shard=REPLICATED),
        *conv1d(f"{SOURCE}.mlp.c_fc2", f"{TARGET}.mlp.fc", "I", "E", shard=COLUMN, bias_shard=COLUMN),
        *conv1d(f"{SOURCE}.mlp.c_fc", f"{TARGET}.mlp.gate", "I", "E", shard=COLUMN, bias_shard=COLUMN),
        *conv1d(f"{SOURCE}.mlp.c_proj", f"{TARGET}.mlp.proj", "E", "I", shard=ROW, bias_shard=REPLICATED),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.ln_2", f"{TARGET}.post_layernorm", bias=True),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", "transformer.wte.weight", Scale("output_scale")),
    ),
    drops=built_in_masks(f"{SOURCE}.attn"),
    position=ByKey("position_embedding_type", {"alibi": "alibi", "learned": "learned_absolute"}, "learned"),
    norm="layer",
    mlp="gated",
    qkv="one matrix, Q; K; V, transposed",
    defaults={"tied": True, "activation": "swiglu"},
    derive=derive_scales,
    fields=(
        constant("gpt_variant", "jais", "the layout"),
        constant("bias", True, "all linear layers have biases"),
        constant("qk_layernorm", False, "Jais has none"),
        attribute("q_scaling"),
        attribute("embedding_scale"),
        *(row for row in GPT_FIELDS if row.target not in OWN),
        *NO_ROPE,
    ),
    requirements=(
        Requirement("position_embedding_type", ("alibi",), "alibi", "only ALiBi is carried over", MODEL),
        Requirement("activation_function", ("swiglu",), "swiglu", "the MLP is gated by silu", MODEL),
        Requirement("scale_attn_by_inverse_layer_idx", (False,), False, "no layer has a scale of its own", MODEL),
    ),
    differences=(ALIBI_SLOPES_CAST,),
    handled_keys=(
        *("n_ctx", "reorder_and_upcast_attn", "scale_attn_weights", "scale_qk_dot_by_d", "mup_scale_qk_dot_by_d"),
        *("width_scale", "mup_width_scale", "mup_output_alpha", "embeddings_scale", "mup_embeddings_scale"),
    ),
    pipeline=True,
    first_release="0.12.0.dev2024072300",
    head_size_since="0.12.0.dev2024071600",
)
