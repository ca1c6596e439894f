"""GPT-J: one norm before attention and MLP in parallel, interleaved rotary on part of each head, a bias on the output.

Sources: tensorrt_llm/models/gptj/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300. Attention and
MLP are summed over the ranks once, so the MLP's second bias lives on the first rank alone.
"""

from porting_kit.architectures.family import GELU_IS_TANH, NORM_EPS_FIXED, Family, Requirement
from porting_kit.architectures.fields import attribute, constant
from porting_kit.architectures.fragments import TARGET, built_in_masks, dense, separate_qkv
from porting_kit.architectures.rules import (
    COLUMN,
    FIRST_RANK,
    ROW,
    VOCABULARY,
    Drop,
    embedding,
    linear,
    norm,
    output_matrix,
    rename,
)

SOURCE = "transformer.h.{i}"
MODEL = "tensorrt_llm/models/gptj/model.py 0.11.0.dev2024062500"

FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    architectures={"GPTJForCausalLM": "GPTJForCausalLM"},
    model_folder="gptj",
    rules=(
        embedding("transformer.wte.weight"),
        *separate_qkv(f"{SOURCE}.attn"),
        *dense(f"{SOURCE}.attn.out_proj"),
        *linear(f"{SOURCE}.mlp.fc_in", f"{TARGET}.mlp.fc", "I,E", shard=COLUMN, bias=True),
        *linear(f"{SOURCE}.mlp.fc_out", f"{TARGET}.mlp.proj", "E,I", shard=ROW, bias=True, bias_shard=FIRST_RANK),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm", bias=True),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
        rename("lm_head.bias [V]", "lm_head.bias", shard=VOCABULARY),
    ),
    drops=(
        *built_in_masks(f"{SOURCE}.attn"),
        Drop(f"{SOURCE}.attn.embed_positions", "rotary tables are computed again"),
    ),
    position="rope_gptj",
    norm="layer",
    mlp="plain",
    qkv="separate",
    defaults={"intermediate_size": "4*E", "tied": False, "activation": "gelu_new", "rotary_dim": "D"},
    spellings={"max_positions": ("n_positions", "max_position_embeddings")},
    fields=(
        attribute("rotary_dim"),
        constant("rotary_base", 10000.0, "GPT-J's base is fixed"),
        constant("rotary_scaling", None, "GPT-J has none"),
    ),
    requirements=(
        Requirement("@intermediate_size", ("=4*E",), None, "the class's MLP is 4 E wide", MODEL),
        Requirement("scale_attn_weights", (True,), True, "attention logits are always divided by sqrt(D)", MODEL),
        Requirement("@rope_base", (10000.0,), 10000.0, "the rotary base is fixed", MODEL),
    ),
    differences=(GELU_IS_TANH, NORM_EPS_FIXED),
    handled_keys=("rotary", "n_ctx", "rope_type"),
)
