"""Persimmon: heads stored one by one, norms on queries and keys, squared ReLU, half of each head rotated.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.11.0.dev2024062500 to 0.16.0.dev2024121000; the class
knows qk_layernorm from 0.10.0.dev2024050700 on. With norms on queries and keys of equal head counts the attention
takes the fused projection head by head, as the source has it (layers/attention.py 0.11.0.dev2024062500 to
0.16.0.dev2024121000).
"""

from porting_kit.architectures.families.gpt2 import GPT_FIELDS
from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant
from porting_kit.architectures.fragments import (
    LAYER,
    TARGET,
    dense,
    plain_mlp,
    recomputed_frequencies,
)
from porting_kit.architectures.rules import Shard, embedding, norm, output_matrix, rename

WHOLE_HEADS = Shard(0, blocks=("3*H*D",), heads=("H",))

FAMILY = Family(
    name="persimmon",
    model_types=("persimmon",),
    architectures={"PersimmonForCausalLM": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("model.embed_tokens.weight"),
        rename(
            f"{LAYER}.self_attn.query_key_value.weight [3*H*D,E]", f"{TARGET}.attention.qkv.weight", shard=WHOLE_HEADS
        ),
        rename(f"{LAYER}.self_attn.query_key_value.bias [3*H*D]", f"{TARGET}.attention.qkv.bias", shard=WHOLE_HEADS),
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
    qkv="interleaved head by head, kept so",
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
    head_size_since="0.12.0.dev2024071600",
    first_release="0.10.0.dev2024050700",
)
