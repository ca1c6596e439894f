"""OPT: learned positions whose table starts with two unused rows, ReLU, norms before or after the sub-layers.

Sources: tensorrt_llm/models/opt/model.py and examples/opt/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300.
"""

from porting_kit.architectures.family import NORM_EPS_FIXED, Family, Requirement, Switch
from porting_kit.architectures.fields import switch
from porting_kit.architectures.fragments import TARGET, dense, plain_mlp, separate_qkv
from porting_kit.architectures.operations import SkipRows
from porting_kit.architectures.rules import embedding, norm, only_when, output_matrix, transform

SOURCE = "model.decoder.layers.{i}"
MODEL = "tensorrt_llm/models/opt/model.py 0.11.0.dev2024062500"


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    architectures={"OPTForCausalLM": "OPTForCausalLM"},
    model_folder="opt",
    rules=(
        embedding("model.decoder.embed_tokens.weight"),
        transform(
            "model.decoder.embed_positions.weight [S+2,E]",
            "transformer.position_embedding.weight",
            SkipRows(2),
            pipeline="first",
        ),
        *separate_qkv(f"{SOURCE}.self_attn", bias=True),
        *dense(f"{SOURCE}.self_attn.out_proj", bias=True),
        *plain_mlp(f"{SOURCE}.fc1", f"{SOURCE}.fc2", bias=True),
        *norm(f"{SOURCE}.self_attn_layer_norm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.final_layer_norm", f"{TARGET}.post_layernorm", bias=True),
        *only_when(
            norm("model.decoder.final_layer_norm", "transformer.ln_f", bias=True, pipeline="last"),
            "do_layer_norm_before",
        ),
        output_matrix("lm_head.weight", tied_from="model.decoder.embed_tokens.weight"),
    ),
    position="learned_absolute",
    norm="layer",
    mlp="plain",
    qkv="separate",
    switches={"do_layer_norm_before": Switch(("do_layer_norm_before",), default=True)},
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "relu"},
    fields=(switch("do_layer_norm_before"),),
    requirements=(
        Requirement("word_embed_proj_dim", ("=E",), None, "embeddings have the hidden size", MODEL),
        Requirement("enable_bias", (True,), True, "all linear layers have biases", MODEL),
        Requirement("layer_norm_elementwise_affine", (True,), True, "norms have weights", MODEL),
        Requirement("_remove_final_layer_norm", (False,), False, "the final norm follows do_layer_norm_before", MODEL),
    ),
    differences=(NORM_EPS_FIXED,),
)
