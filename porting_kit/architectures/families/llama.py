"""LLaMA and everything that is LLaMA under another name: Mistral, InternLM, Yi, Vicuna, SmolLM, Aquila.

Sources: tensorrt_llm/models/llama/{model,config,convert}.py, 0.9.0.dev2024022700 to 0.13.0.dev2024090300.
TensorRT-LLM's `fc` is the activated branch (gate_proj), its `gate` the linear one (up_proj).
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, constant, switch
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.operations import Concatenate
from porting_kit.architectures.rules import (
    COLUMN,
    QKV,
    REPLICATED,
    ROW,
    Drop,
    Rule,
    embedding,
    fuse,
    linear,
    norm,
    output_matrix,
    rename,
)

SOURCE, TARGET = "model.layers.{i}", "transformer.layers.{i}"

ATTENTION_RULES = (
    fuse(
        [
            f"{SOURCE}.self_attn.q_proj.weight [H*D,E]",
            f"{SOURCE}.self_attn.k_proj.weight [K*D,E]",
            f"{SOURCE}.self_attn.v_proj.weight [K*D,E]",
        ],
        f"{TARGET}.attention.qkv.weight",
        shard=QKV,
    ),
    rename(f"{SOURCE}.self_attn.o_proj.weight [E,H*D]", f"{TARGET}.attention.dense.weight", shard=ROW),
)
QKV_BIAS = Rule(
    f"{TARGET}.attention.qkv.bias",
    (
        TensorSpec.parse(f"{SOURCE}.self_attn.q_proj.bias [H*D]"),
        TensorSpec.parse(f"{SOURCE}.self_attn.k_proj.bias [K*D]"),
        TensorSpec.parse(f"{SOURCE}.self_attn.v_proj.bias [K*D]"),
    ),
    (Concatenate(0),),
    shard=QKV,
    when="attention_bias",
)
DENSE_BIAS = Rule(
    f"{TARGET}.attention.dense.bias",
    (TensorSpec.parse(f"{SOURCE}.self_attn.o_proj.bias [E]"),),
    shard=REPLICATED,
    when="attention_bias",
    zeros_when_absent=("E",),
)
MLP_RULES = (
    *linear(f"{SOURCE}.mlp.gate_proj", f"{TARGET}.mlp.fc", "I,E", shard=COLUMN, bias="mlp_bias"),
    *linear(f"{SOURCE}.mlp.up_proj", f"{TARGET}.mlp.gate", "I,E", shard=COLUMN, bias="mlp_bias"),
    *linear(f"{SOURCE}.mlp.down_proj", f"{TARGET}.mlp.proj", "E,I", shard=ROW, bias="mlp_bias"),
)
NORM_RULES = (
    *norm(f"{SOURCE}.input_layernorm", f"{TARGET}.input_layernorm"),
    *norm(f"{SOURCE}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
)
OUTER_RULES = (
    embedding("model.embed_tokens.weight"),
    *norm("model.norm", "transformer.ln_f", pipeline="last"),
    output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
)
INVERSE_FREQUENCIES = Drop(
    "model.layers.{i}.self_attn.rotary_emb.inv_freq", "rotary frequencies are computed again from the base"
)

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "internlm", "aquila", "yi"),
    architectures={
        "LlamaForCausalLM": "LlamaForCausalLM",
        "LLaMAForCausalLM": "LlamaForCausalLM",
        "MistralForCausalLM": "MistralForCausalLM",
        "InternLMForCausalLM": "InternLMForCausalLM",
        "AquilaForCausalLM": "LlamaForCausalLM",
        "YiForCausalLM": "LlamaForCausalLM",
    },
    model_folder="llama",
    rules=(*OUTER_RULES, *ATTENTION_RULES, QKV_BIAS, DENSE_BIAS, *MLP_RULES, *NORM_RULES),
    drops=(INVERSE_FREQUENCIES,),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    switches={
        "attention_bias": Switch(("attention_bias", "bias"), evidence="model.layers.0.self_attn.q_proj.bias"),
        "mlp_bias": Switch(("mlp_bias",), evidence="model.layers.0.mlp.gate_proj.bias"),
    },
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *ROPE_FIELDS,
        switch("attn_bias", "attention_bias"),
        switch("mlp_bias"),
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
)
