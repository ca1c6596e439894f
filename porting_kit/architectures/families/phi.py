"""Phi-1, 1.5 and 2: one norm before attention and MLP in parallel, partial rotary, a bias on the output.

Sources: tensorrt_llm/models/phi/{model,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300. 0.9 and 0.10 read
`partial_rotary_factor`, later releases `rotary_pct`; both are written. Until 0.13.0.dev2024081300 the class reads the
first rank's file everywhere and splits it itself (models/modeling_utils.py, WEIGHT_LOADER_MODELS).
"""

from porting_kit.architectures.family import NORM_EPS_FIXED, Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute
from porting_kit.architectures.fragments import LAYER, TARGET, dense, plain_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import VOCABULARY, embedding, norm, output_matrix, rename

MODEL = "tensorrt_llm/models/phi/model.py 0.11.0.dev2024062500"

FAMILY = Family(
    name="phi",
    model_types=("phi",),
    architectures={"PhiForCausalLM": "PhiForCausalLM"},
    model_folder="phi",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias=True),
        *dense(f"{LAYER}.self_attn.dense", bias=True),
        *plain_mlp(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.fc2", bias=True),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm("model.final_layernorm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
        rename("lm_head.bias [V]", "lm_head.bias", shard=VOCABULARY),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="separate",
    defaults={"tied": False, "activation": "gelu_new", "rope_share": 0.5},
    fields=(
        *ROPE_FIELDS,
        attribute("rotary_pct", "rope_share"),
        attribute("partial_rotary_factor", "rope_share"),
    ),
    requirements=(
        Requirement("qk_layernorm", (False,), False, "queries and keys are not normalised", MODEL),
        Requirement("@num_kv_heads", ("=H",), None, "the class has no grouped-query attention", MODEL),
        Requirement("@rope_scaling", (None,), None, "the class takes no rotary scaling", MODEL),
    ),
    differences=(NORM_EPS_FIXED,),
    ranks_since="0.13.0.dev2024081300",
)
