"""Persimmon: heads stored one by one, norms on queries and keys, squared ReLU, half of each head rotated.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.11.0.dev2024062500 to 0.16.0.dev2024121000; the class
knows qk_layernorm from v0.10.0 on.
"""

from porting_kit.architectures.families.gpt2 import GPT_FIELDS
from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant
from porting_kit.architectures.fragments import (
    HEAD_BY_HEAD,
    LAYER,
    TARGET,
    dense,
    fused_qkv,
    plain_mlp,
    recomputed_frequencies,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="persimmon",
    model_types=("persimmon",),
    architectures={"PersimmonForCausalLM": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("model.embed_tokens.weight"),
        *fused_qkv(f"{LAYER}.self_attn.query_key_value", HEAD_BY_HEAD, bias=True),
        *dense(f"{LAYER}.self_attn.dense", bias=True),
        *norm(f"{LAYER}.self_attn.q_layernorm", f"{TARGET}.attention.q_layernorm", bias=True, size="D"),
        *norm(f"{LAYER}.self_attn.k_layernorm", f"{TARGET}.attention.k_layernorm", bias=True, size="D"),
        *plain_mlp(f"{LAYER}.mlp.dense_h_to_4h", f"{LAYER}.mlp.dense_4h_to_h", bias=True),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True),
        *norm("model.final_layernorm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="interleaved head by head",
    defaults={"tied": False, "activation": "relu2", "rope_share": 0.5, "rope_base": 25000.0},
    fields=(
        constant("gpt_variant", "persimmon", "the layout"),
        constant("bias", True, "all linear layers have biases"),
        constant("qk_layernorm", True, "queries and keys are normalised"),
        attribute("rotary_pct", "rope_share"),
        *ROPE_FIELDS,
        *GPT_FIELDS,
    ),
    requirements=(
        Requirement(
            "qk_layernorm",
            (True,),
            True,
            "queries and keys are always normalised",
            "tensorrt_llm/models/gpt/config.py 0.13.0.dev2024090300",
        ),
    ),
    pipeline=True,
    first_release="0.10.0",
)
