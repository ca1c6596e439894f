"""Cohere Command R: one norm before attention and MLP in parallel, interleaved rotary, scaled logits.

Sources: tensorrt_llm/models/commandr/{model,config}.py, 0.15.0.dev2024101500 to 0.16.0.dev2024121000.
"""

from porting_kit.architectures.family import Family, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, key, switch
from porting_kit.architectures.fragments import (
    LAYER,
    TARGET,
    dense,
    gated_mlp,
    recomputed_frequencies,
    separate_qkv,
    zero_dense_bias,
)
from porting_kit.architectures.operations import Concatenate, Group
from porting_kit.architectures.rules import Shard, embedding, norm, only_when, output_matrix, rename

QKV_RULES = separate_qkv(f"{LAYER}.self_attn", bias="attention_bias")


def derive_layout(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """With norms on queries and keys of equal head counts the attention takes the projection head by head."""
    by_head = bool(raw.get("use_qk_norm")) and values["num_heads"] == values["num_kv_heads"]
    return {"by_head": (by_head, "use_qk_norm with as many key/value heads as query heads")}


FAMILY = Family(
    name="cohere",
    model_types=("cohere",),
    architectures={"CohereForCausalLM": "CohereForCausalLM"},
    model_folder="commandr",
    rules=(
        embedding("model.embed_tokens.weight"),
        *only_when(QKV_RULES, "!by_head"),
        *only_when(
            QKV_RULES,
            "by_head",
            operations=(Concatenate(0), Group("H", ("1", "1", "1"))),
            shard=Shard(0, blocks=("3*H*D",), heads=("H",)),
        ),
        *dense(f"{LAYER}.self_attn.o_proj"),
        zero_dense_bias(f"{LAYER}.self_attn.o_proj", when="attention_bias"),
        rename(
            f"{LAYER}.self_attn.q_norm.weight [H,D]",
            f"{TARGET}.attention.q_layernorm.weight",
            shard=Shard(0, blocks=("H",), heads=("H",)),
            when="qk_norm",
        ),
        rename(
            f"{LAYER}.self_attn.k_norm.weight [K,D]",
            f"{TARGET}.attention.k_layernorm.weight",
            shard=Shard(0, blocks=("K",), heads=("K",)),
            when="qk_norm",
        ),
        *gated_mlp(f"{LAYER}.mlp"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gptj",
    norm="layer",
    mlp="gated",
    qkv="separate",
    switches={
        "attention_bias": Switch(("attention_bias",), default=False),
        "qk_norm": Switch(("use_qk_norm",), default=False),
        "by_head": Switch(),
    },
    defaults={"tied": True, "activation": "silu"},
    derive=derive_layout,
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "attention_bias"),
        switch("qk_layernorm", "qk_norm"),
        key("output_multiplier_scale", "logit_scale", 0.0625),
    ),
    pipeline=True,
    first_release="0.15.0.dev2024101500",
    head_size_since="0.15.0.dev2024101500",
)
