"""LLaMA and everything that is LLaMA under another name: Mistral, InternLM, Yi, Vicuna, SmolLM, Aquila.

Sources: tensorrt_llm/models/llama/{model,config,convert}.py, 0.8.0.dev2024013000 to 0.13.0.dev2024090300.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, switch
from porting_kit.architectures.fragments import (
    LAYER,
    TARGET,
    dense,
    gated_mlp,
    recomputed_frequencies,
    separate_qkv,
    zero_dense_bias,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "internlm", "aquila", "yi", "skywork"),
    architectures={
        "LlamaForCausalLM": "LlamaForCausalLM",
        "LLaMAForCausalLM": "LlamaForCausalLM",
        "MistralForCausalLM": "MistralForCausalLM",
        "InternLMForCausalLM": "InternLMForCausalLM",
        "SkyworkForCausalLM": "SkyworkForCausalLM",
        "AquilaForCausalLM": "LlamaForCausalLM",
        "YiForCausalLM": "LlamaForCausalLM",
    },
    model_folder="llama",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias="attention_bias"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        zero_dense_bias(f"{LAYER}.self_attn.o_proj", when="attention_bias"),
        *gated_mlp(f"{LAYER}.mlp", bias="mlp_bias"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={
        "attention_bias": Switch(("attention_bias", "bias"), evidence="model.layers.0.self_attn.q_proj.bias"),
        # models/skywork/model.py of 0.8.0
        "mlp_width_by_old_name": Switch(until="0.9.0.dev2024020600"),
        "mlp_bias": Switch(("mlp_bias",), evidence="model.layers.0.mlp.gate_proj.bias"),
    },
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "attention_bias"),
        switch("mlp_bias"),
        attribute("mlp_hidden_size", "intermediate_size", when="mlp_width_by_old_name"),
        constant("residual_mlp", False, "only Arctic has one"),
    ),
    requirements=(
        Requirement(
            "rope_interleaved",
            (False,),
            False,
            "the class rotates halves, not neighbouring pairs",
            "tensorrt_llm/models/llama/model.py 0.11.0.dev2024062500",
        ),
    ),
    pipeline=True,
    head_size_since="0.10.0.dev2024043000",
)
