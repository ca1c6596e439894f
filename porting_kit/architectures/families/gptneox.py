"""GPT-NeoX (Pythia, Dolly, StableLM-alpha): parallel residual with two norms, partial rotary, interleaved q/k/v.

Sources: tensorrt_llm/models/gptneox/model.py and examples/gptneox/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300. Up to 0.11 the class reads `rotary_emb_base`; from 0.12 on the rotary tables are made from
`rotary_base` (layers/attention.py 0.13.0.dev2024090300, create_attention_const_params), so both keys are written.
"""

from porting_kit.architectures.family import GELU_IS_TANH, NORM_EPS_FIXED, Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute
from porting_kit.architectures.fragments import (
    HEAD_BY_HEAD,
    TARGET,
    built_in_masks,
    dense,
    fused_qkv,
    plain_mlp,
    recomputed_frequencies,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix

SOURCE = "gpt_neox.layers.{i}"
MODEL = "tensorrt_llm/models/gptneox/model.py 0.11.0.dev2024062500"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """The class has no grouped-query attention: one key/value head per query head."""
    return {"num_kv_heads": (values["num_heads"], "H")}


FAMILY = Family(
    name="gptneox",
    model_types=("gpt_neox",),
    architectures={"GPTNeoXForCausalLM": "GPTNeoXForCausalLM"},
    model_folder="gptneox",
    rules=(
        embedding("gpt_neox.embed_in.weight"),
        *fused_qkv(f"{SOURCE}.attention.query_key_value", HEAD_BY_HEAD, bias=True),
        *dense(f"{SOURCE}.attention.dense", bias=True),
        *plain_mlp(f"{SOURCE}.mlp.dense_h_to_4h", f"{SOURCE}.mlp.dense_4h_to_h", bias=True),
        *norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_attention_layernorm", bias=True),
        *norm("gpt_neox.final_layer_norm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("embed_out.weight", tied_from="gpt_neox.embed_in.weight"),
    ),
    drops=(*built_in_masks(f"{SOURCE}.attention"), recomputed_frequencies(f"{SOURCE}.attention")),
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
        Requirement("@intermediate_size", ("=4*E",), None, "the class's MLP is 4 E wide", MODEL),
        Requirement("@rope_scaling", (None,), None, "the class takes no rotary scaling", MODEL),
    ),
    differences=(GELU_IS_TANH, NORM_EPS_FIXED),
)
