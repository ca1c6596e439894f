"""GPT-NeoX (Pythia, Dolly, StableLM-alpha): parallel residual with two norms, partial rotary, interleaved q/k/v.

Sources: tensorrt_llm/models/gptneox/model.py and examples/gptneox/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300. Up to 0.11 the class reads `rotary_emb_base`; from 0.12 on the rotary tables are made from
`rotary_base` (layers/attention.py 0.13.0.dev2024090300, create_attention_const_params), so both keys are written.
"""

from porting_kit.architectures.family import GELU_IS_TANH, NORM_EPS_FIXED, Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute
from porting_kit.architectures.operations import Ungroup
from porting_kit.architectures.rules import (
    COLUMN,
    QKV,
    ROW,
    Drop,
    embedding,
    linear,
    norm,
    output_matrix,
    transform,
)

SOURCE, TARGET = "gpt_neox.layers.{i}", "transformer.layers.{i}"
HEAD_BY_HEAD = Ungroup("H", ("1", "1", "1"))
MODEL = "tensorrt_llm/models/gptneox/model.py 0.11.0.dev2024062500"


def derive_sizes(raw: dict) -> dict[str, tuple[object, str]]:
    """The class has no grouped-query attention: one key/value head per query head."""
    return {"num_kv_heads": (raw["_normalised"]["num_heads"], "H")}


FAMILY = Family(
    name="gptneox",
    model_types=("gpt_neox",),
    architectures={"GPTNeoXForCausalLM": "GPTNeoXForCausalLM"},
    model_folder="gptneox",
    rules=(
        embedding("gpt_neox.embed_in.weight"),
        transform(
            f"{SOURCE}.attention.query_key_value.weight [3*H*D,E]",
            f"{TARGET}.attention.qkv.weight",
            HEAD_BY_HEAD,
            shard=QKV,
        ),
        transform(
            f"{SOURCE}.attention.query_key_value.bias [3*H*D]",
            f"{TARGET}.attention.qkv.bias",
            HEAD_BY_HEAD,
            shard=QKV,
        ),
        *linear(f"{SOURCE}.attention.dense", f"{TARGET}.attention.dense", "E,H*D", shard=ROW, bias=True),
        *linear(f"{SOURCE}.mlp.dense_h_to_4h", f"{TARGET}.mlp.fc", "I,E", shard=COLUMN, bias=True),
        *linear(f"{SOURCE}.mlp.dense_4h_to_h", f"{TARGET}.mlp.proj", "E,I", shard=ROW, bias=True),
        *norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_attention_layernorm", bias=True),
        *norm("gpt_neox.final_layer_norm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("embed_out.weight", tied_from="gpt_neox.embed_in.weight"),
    ),
    drops=(
        Drop(f"{SOURCE}.attention.bias", "the causal mask is built in"),
        Drop(f"{SOURCE}.attention.masked_bias", "the causal mask is built in"),
        Drop(f"{SOURCE}.attention.rotary_emb.inv_freq", "rotary frequencies are computed again from the base"),
    ),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="interleaved head by head",
    defaults={"intermediate_size": "4*E", "tied": False, "activation": "gelu", "rope_share": 0.25},
    derive=derive_sizes,
    fields=(*ROPE_FIELDS, attribute("rotary_emb_base", "rope_base"), attribute("rotary_pct", "rope_share")),
    requirements=(
        Requirement("use_parallel_residual", (True,), True, "attention and MLP are always added in parallel", MODEL),
        Requirement("attention_bias", (True,), True, "the class's projections always have biases", MODEL),
        Requirement("@rope_scaling", (None,), None, "the class takes no rotary scaling", MODEL),
    ),
    differences=(GELU_IS_TANH, NORM_EPS_FIXED),
)
