"""OPT: learned positions whose table starts with two unused rows, ReLU, norms before or after the sub-layers.

Sources: tensorrt_llm/models/opt/model.py and examples/opt/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300. The class has no projections between embeddings and layers: they go into the embedding and into
the output matrix, as products in float32. What Medusa heads read is then the last layer's own output, before the
projection out.
"""

from porting_kit.architectures.family import NORM_EPS_FIXED, Family, Requirement, Switch
from porting_kit.architectures.fields import switch
from porting_kit.architectures.fragments import TARGET, dense, plain_mlp, separate_qkv
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.operations import Product, SkipRows
from porting_kit.architectures.rules import VOCABULARY, Rule, embedding, norm, only_when, output_matrix, transform

SOURCE = "model.decoder.layers.{i}"
MODEL = "tensorrt_llm/models/opt/model.py 0.11.0.dev2024062500"


def fuse_product(first: str, second: str, target: str, *, transposed: bool = False, **options: object) -> Rule:
    """Two matrices as their product, where the model has a projection between embeddings and layers."""
    specs = (TensorSpec.parse(first), TensorSpec.parse(second))
    return Rule(target, specs, (Product(transposed),), when="projected", **{"pipeline": "last", **options})


def derive_projection(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Embeddings of another width than the hidden size have projections in and out (OPT-350m)."""
    return {"projected": (values["embedding_size"] != values["hidden_size"], "word_embed_proj_dim is not E")}


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    architectures={"OPTForCausalLM": "OPTForCausalLM"},
    model_folder="opt",
    rules=(
        *only_when([embedding("model.decoder.embed_tokens.weight")], "!projected"),
        fuse_product(
            "model.decoder.embed_tokens.weight [V,P]",
            "model.decoder.project_in.weight [E,P]",
            "transformer.vocab_embedding.weight",
            transposed=True,
            pipeline="first",
        ),
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
        *only_when([output_matrix("lm_head.weight", tied_from="model.decoder.embed_tokens.weight")], "!projected"),
        fuse_product(
            "lm_head.weight [V,P]",
            "model.decoder.project_out.weight [P,E]",
            "lm_head.weight",
            tied_from="model.decoder.embed_tokens.weight",
            shard=VOCABULARY,
        ),
    ),
    position="learned_absolute",
    norm="layer",
    mlp="plain",
    qkv="separate",
    switches={"do_layer_norm_before": Switch(("do_layer_norm_before",), default=True), "projected": Switch()},
    derive=derive_projection,
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "relu"},
    fields=(switch("do_layer_norm_before"),),
    requirements=(
        Requirement("enable_bias", (True,), True, "all linear layers have biases", MODEL),
        Requirement("layer_norm_elementwise_affine", (True,), True, "norms have weights", MODEL),
        Requirement("_remove_final_layer_norm", (False,), False, "the final norm follows do_layer_norm_before", MODEL),
    ),
    differences=(NORM_EPS_FIXED,),
)
