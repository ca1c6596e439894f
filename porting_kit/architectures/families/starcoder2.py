"""StarCoder 2: LLaMA's projections with biases, a plain MLP, LayerNorms, rotary positions.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.9.0.dev2024031900 to 0.16.0.dev2024121000.
"""

from porting_kit.architectures.families.gpt2 import GPT_FIELDS
from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, switch
from porting_kit.architectures.fragments import LAYER, TARGET, dense, plain_mlp, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures={"Starcoder2ForCausalLM": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias="bias"),
        *dense(f"{LAYER}.self_attn.o_proj", bias="bias"),
        *plain_mlp(f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.c_proj", bias="bias"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm", bias=True),
        *norm("model.norm", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="layer",
    mlp="plain",
    qkv="separate",
    switches={"bias": Switch(("use_bias",), default=True)},
    defaults={"tied": True, "activation": "gelu_pytorch_tanh"},
    fields=(
        constant("gpt_variant", "starcoder2", "the layout"),
        switch("bias"),
        constant("qk_layernorm", False, "StarCoder 2 has none"),
        attribute("rotary_pct", "rope_share"),
        *ROPE_FIELDS,
        *GPT_FIELDS,
    ),
    requirements=(
        Requirement(
            "mlp_type",
            ("default",),
            "default",
            "the MLP has two layers",
            "tensorrt_llm/models/gpt/convert.py 0.13.0.dev2024090300",
        ),
        Requirement(
            "norm_type",
            ("layer_norm",),
            "layer_norm",
            "the norms are LayerNorms",
            "tensorrt_llm/models/gpt/model.py 0.13.0.dev2024090300",
        ),
    ),
    pipeline=True,
    head_size_since="0.12.0.dev2024071600",
    first_release="0.9.0.dev2024031900",
)
