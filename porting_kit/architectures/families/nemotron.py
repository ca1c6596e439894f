"""Nemotron (Minitron): LayerNorms stored as offsets from one, squared ReLU, partial rotary, no biases.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.9.0.dev2024031900 to 0.16.0.dev2024121000; the norm's
"+ 1" as in the NeMo path of gpt/convert.py (layernorm_1p). GPTForCausalLM is the name every release knows.
"""

from porting_kit.architectures.families.gpt2 import GPT_FIELDS
from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant
from porting_kit.architectures.fragments import LAYER, TARGET, dense, plain_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.operations import Add
from porting_kit.architectures.rules import Rule, embedding, output_matrix, rename, transform

MODEL = "tensorrt_llm/models/gpt/model.py 0.11.0.dev2024062500"


def norm_from_one(source: str, target: str, **options: object) -> list[Rule]:
    """A LayerNorm whose weight is stored minus one."""
    return [
        transform(f"{source}.weight [E]", f"{target}.weight", Add(1.0), **options),
        rename(f"{source}.bias [E]", f"{target}.bias", **options),
    ]


FAMILY = Family(
    name="nemotron",
    model_types=("nemotron",),
    architectures={"NemotronForCausalLM": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *plain_mlp(f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"),
        *norm_from_one(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm_from_one(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm_from_one("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="separate",
    defaults={"tied": False, "activation": "relu2", "rope_share": 0.5},
    fields=(
        constant("gpt_variant", "nemotron", "the layout"),
        constant("bias", False, "no linear layer has a bias"),
        constant("qk_layernorm", False, "Nemotron has none"),
        attribute("rotary_pct", "rope_share"),
        *ROPE_FIELDS,
        *GPT_FIELDS,
    ),
    requirements=(
        Requirement("attention_bias", (False,), False, "biases are all or none, norms aside", MODEL),
        Requirement("mlp_bias", (False,), False, "biases are all or none, norms aside", MODEL),
    ),
    pipeline=True,
    first_release="0.9.0.dev2024031900",
    head_size_since="0.12.0.dev2024071600",
)
