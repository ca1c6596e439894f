"""EXAONE 3: LLaMA under GPT-2's names.

Sources: tensorrt_llm/models/llama/{model,config,convert}.py, 0.13.0.dev2024081300 to 0.16.0.dev2024121000.
"""

from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, constant
from porting_kit.architectures.fragments import TARGET, dense, gated_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import embedding, norm, output_matrix

SOURCE = "transformer.h.{i}"
MODEL = "tensorrt_llm/models/llama/convert.py 0.14.0.dev2024100800"
ATTENTION = f"{SOURCE}.attn.attention"

FAMILY = Family(
    name="exaone",
    model_types=("exaone",),
    architectures={"ExaoneForCausalLM": "ExaoneForCausalLM"},
    model_folder="llama",
    rules=(
        embedding("transformer.wte.weight"),
        *separate_qkv(ATTENTION),
        *dense(f"{ATTENTION}.out_proj"),
        *gated_mlp(f"{SOURCE}.mlp", names=("c_fc_0", "c_fc_1", "c_proj")),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm"),
        *norm(f"{SOURCE}.ln_2", f"{TARGET}.post_layernorm"),
        *norm("transformer.ln_f", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    drops=(recomputed_frequencies(ATTENTION), recomputed_frequencies(f"{SOURCE}.attn.attention.rotary")),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    defaults={"norm_eps": 1e-5, "activation": "silu", "tied": False},
    fields=(
        *ROPE_FIELDS,
        constant("attn_bias", False, "EXAONE has none"),
        constant("mlp_bias", False, "EXAONE has none"),
        constant("residual_mlp", False, "only Arctic has one"),
    ),
    requirements=(Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),),
    pipeline=True,
    first_release="0.13.0.dev2024081300",
    head_size_since="0.13.0.dev2024081300",
)
