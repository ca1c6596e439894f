"""DBRX: experts kept as one matrix, LayerNorms without biases, queries, keys and values clipped.

Sources: tensorrt_llm/models/dbrx/{model,config}.py and examples/dbrx/convert_checkpoint.py, 0.9.0.dev2024040900 to
0.16.0.dev2024121000. Until 0.11.0.dev2024060400 the class reads the experts' settings from one mapping, `moe_config`;
until 0.11.0.dev2024061100 its norms have biases.
"""

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, fields_when, key
from porting_kit.architectures.fragments import EXPERT_SWITCHES, TARGET, dense, fused_qkv, named_by_release
from porting_kit.architectures.names import TensorSpec
from porting_kit.architectures.operations import Concatenate, Reshape, Transpose
from porting_kit.architectures.rules import EXPERTS_DOWN, EXPERTS_UP, Rule, embedding, norm, output_matrix, rename

SOURCE = "transformer.blocks.{i}"
EXPERTS = f"{SOURCE}.ffn.experts.mlp"
MODEL = "tensorrt_llm/models/dbrx/model.py 0.11.0.dev2024062500"


def zero_norm_bias(source: str, target: str, pipeline: str = "layer") -> Rule:
    """The bias that the older class's LayerNorms insist on: zeros."""
    spec = TensorSpec(f"{source}.bias", ("E",))
    return Rule(f"{target}.bias", (spec,), when="norm_biases", zeros_when_absent=("E",), pipeline=pipeline)


FAMILY = Family(
    name="dbrx",
    model_types=("dbrx",),
    architectures={"DbrxForCausalLM": "DbrxForCausalLM"},
    model_folder="dbrx",
    rules=(
        embedding("transformer.wte.weight"),
        *fused_qkv(f"{SOURCE}.norm_attn_norm.attn.Wqkv"),
        *dense(f"{SOURCE}.norm_attn_norm.attn.out_proj"),
        *named_by_release(
            [
                rename(f"{SOURCE}.ffn.router.layer.weight [X,E]", f"{TARGET}.mlp.router.weight", dtype="float32"),
                Rule(
                    f"{TARGET}.mlp.fc.weight",
                    (TensorSpec(f"{EXPERTS}.v1", ("X*J", "E")), TensorSpec(f"{EXPERTS}.w1", ("X*J", "E"))),
                    (Reshape(("X", "J", "E")), Concatenate(1)),
                    shard=EXPERTS_UP,
                ),
                Rule(
                    f"{TARGET}.mlp.proj.weight",
                    (TensorSpec(f"{EXPERTS}.w2", ("X*J", "E")),),
                    (Reshape(("X", "J", "E")), Transpose()),
                    shard=EXPERTS_DOWN,
                ),
            ]
        ),
        *norm(f"{SOURCE}.norm_attn_norm.norm_1", f"{TARGET}.input_layernorm"),
        *norm(f"{SOURCE}.norm_attn_norm.norm_2", f"{TARGET}.post_layernorm"),
        *norm("transformer.norm_f", "transformer.ln_f", pipeline="last"),
        zero_norm_bias(f"{SOURCE}.norm_attn_norm.norm_1", f"{TARGET}.input_layernorm"),
        zero_norm_bias(f"{SOURCE}.norm_attn_norm.norm_2", f"{TARGET}.post_layernorm"),
        zero_norm_bias("transformer.norm_f", "transformer.ln_f", "last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    position="rope_gpt_neox",
    norm="layer",
    mlp="experts",
    qkv="one matrix, Q; K; V",
    spellings={
        "num_kv_heads": ("attn_config.kv_n_heads",),
        "num_experts": ("ffn_config.moe_num_experts",),
        "experts_per_token": ("ffn_config.moe_top_k",),
        "expert_size": ("ffn_config.ffn_hidden_size",),
        "intermediate_size": ("ffn_config.ffn_hidden_size",),
    },
    switches={
        **EXPERT_SWITCHES,
        "one_mapping": Switch(until="0.11.0.dev2024060400"),
        "norm_biases": Switch(until="0.11.0.dev2024061100"),
    },
    defaults={"tied": False, "activation": "silu"},
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("bias", False, "no biases"),
        key("clip_qkv", "attn_config.clip_qkv", None),
        *fields_when(
            (
                attribute("moe_num_experts", "num_experts"),
                attribute("moe_top_k", "experts_per_token"),
                constant("moe_normalization_mode", 1, "the weights of the chosen experts add up to one"),
            ),
            "!one_mapping",
        ),
        *fields_when(
            (
                attribute("moe_config.num_experts", "num_experts"),
                attribute("moe_config.top_k", "experts_per_token"),
                constant("moe_config.tp_mode", 2, "experts are split over the ranks inside, not among them"),
                constant("moe_config.normalization_mode", 1, "the weights of the chosen experts add up to one"),
            ),
            "one_mapping",
        ),
    ),
    requirements=(
        Requirement("ffn_config.moe_normalize_expert_weights", (1, 1.0), 1.0, "expert weights add up to one", MODEL),
        Requirement("ffn_config.ffn_act_fn.name", ("silu",), "silu", "experts are gated by silu", MODEL),
    ),
    handled_keys=("num_key_value_heads", "resid_pdrop"),
    pipeline=True,
    first_release="0.9.0.dev2024040900",
)
