"""InternLM 2: LLaMA with one fused projection, stored key/value head by key/value head, and names of its own.

Sources: examples/internlm2/convert_checkpoint.py and tensorrt_llm/models/llama/model.py, 0.11.0.dev2024060400 to
0.13.0.dev2024090300. InternLM2ForCausalLM is LLaMA's class in MODEL_MAP.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, constant, switch
from porting_kit.architectures.fragments import (
    GROUP_BY_GROUP,
    LAYER,
    TARGET,
    dense,
    fused_qkv,
    gated_mlp,
    recomputed_frequencies,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="internlm2",
    model_types=("internlm2",),
    architectures={"InternLM2ForCausalLM": "InternLM2ForCausalLM"},
    model_folder="llama",
    rules=(
        embedding("model.tok_embeddings.weight"),
        *fused_qkv(f"{LAYER}.attention.wqkv", GROUP_BY_GROUP, bias="bias"),
        *dense(f"{LAYER}.attention.wo", bias="bias"),
        *gated_mlp(f"{LAYER}.feed_forward", names=("w1", "w3", "w2")),
        *norm(f"{LAYER}.attention_norm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.ffn_norm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("output.weight", tied_from="model.tok_embeddings.weight"),
    ),
    drops=(recomputed_frequencies(f"{LAYER}.attention"),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="interleaved group by group",
    switches={"bias": Switch(("bias",), default=False)},
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "bias"),
        constant("mlp_bias", False, "InternLM 2 has none"),
        constant("residual_mlp", False, "only Arctic has one"),
    ),
    requirements=(
        Requirement(
            "@rope_scaling",
            (None,),
            None,
            "its dynamic scaling differs from LLaMA's",
            "examples/internlm2/convert_checkpoint.py 0.13.0.dev2024090300",
        ),
    ),
    handled_keys=("attn_implementation",),
    pipeline=True,
    first_release="0.11.0.dev2024060400",
    head_size_since="0.11.0.dev2024060400",
)
