"""BLOOM: ALiBi, LayerNorms with biases, one norm after the embedding, queries, keys and values stored head by head.

Sources: tensorrt_llm/models/bloom/model.py and examples/bloom/convert_checkpoint.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300.
"""

from porting_kit.architectures.family import ALIBI_SLOPES_CAST, NORM_EPS_FIXED, Family, Requirement
from porting_kit.architectures.fields import constant
from porting_kit.architectures.fragments import HEAD_BY_HEAD, TARGET, dense, fused_qkv, plain_mlp
from porting_kit.architectures.rules import embedding, norm, output_matrix

SOURCE = "transformer.h.{i}"

FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    architectures={"BloomForCausalLM": "BloomForCausalLM"},
    model_folder="bloom",
    rules=(
        embedding("transformer.word_embeddings.weight"),
        *norm("transformer.word_embeddings_layernorm", "transformer.ln_embed", bias=True, pipeline="first"),
        *fused_qkv(f"{SOURCE}.self_attention.query_key_value", HEAD_BY_HEAD, bias=True),
        *dense(f"{SOURCE}.self_attention.dense", bias=True),
        *plain_mlp(f"{SOURCE}.mlp.dense_h_to_4h", f"{SOURCE}.mlp.dense_4h_to_h", bias=True),
        *norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.word_embeddings.weight"),
    ),
    position="alibi",
    norm="layer",
    mlp="plain",
    qkv="interleaved head by head",
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "gelu", "max_positions": 2048},
    fields=(constant("hidden_act", "gelu", "the class uses gelu whatever the config says; BLOOM's is its tanh form"),),
    requirements=(
        Requirement(
            "apply_residual_connection_post_layernorm",
            (False,),
            False,
            "the class adds the residual from before the norm",
            "tensorrt_llm/models/bloom/model.py 0.11.0.dev2024062500",
        ),
    ),
    differences=(NORM_EPS_FIXED, ALIBI_SLOPES_CAST),
    spellings={"max_positions": ("seq_length", "max_position_embeddings")},
)
