"""Cohere Command R: one norm before attention and MLP in parallel, interleaved rotary, scaled logits.

Sources: tensorrt_llm/models/commandr/{model,config}.py, 0.16.0.dev2024121000.
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
from porting_kit.architectures.rules import Shard, embedding, norm, output_matrix, rename

FAMILY = Family(
    name="cohere",
    model_types=("cohere",),
    architectures={"CohereForCausalLM": "CohereForCausalLM"},
    model_folder="commandr",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias="attention_bias"),
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
    },
    defaults={"tied": True, "activation": "silu"},
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "attention_bias"),
        switch("qk_layernorm", "qk_norm"),
        key("output_multiplier_scale", "logit_scale", 0.0625),
    ),
    pipeline=True,
    first_release="0.15.0",
)
