"""Qwen 1.5 and 2 with experts and one shared expert.

Sources: tensorrt_llm/models/qwen/{model,config,convert}.py, 0.12.0.dev2024072300 to 0.16.0.dev2024121000. Before that
the class asks for an object that no config.json can hold. From 0.16.0.dev2024111900 on the shared expert is a part of
the MLP (layers/moe.py, class SharedMoE).
"""

from porting_kit.architectures.families.qwen2 import MODEL, NO_WINDOW, QWEN_FIELDS
from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import attribute, constant
from porting_kit.architectures.fragments import LAYER, TARGET, dense, experts, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import ROW, Rule, Shard, embedding, fuse, norm, only_when, output_matrix, rename

SHARED = f"{LAYER}.mlp.shared_expert"


def shared_expert(target: str) -> list[Rule]:
    """The expert every token passes: [up; gate] in one matrix, and the gate that weighs it."""
    return [
        fuse(
            [f"{SHARED}.up_proj.weight [G,E]", f"{SHARED}.gate_proj.weight [G,E]"],
            f"{target}.fc.weight",
            shard=Shard(0, blocks=("G", "G")),
        ),
        rename(f"{SHARED}.down_proj.weight [E,G]", f"{target}.proj.weight", shard=ROW),
        rename(f"{LAYER}.mlp.shared_expert_gate.weight [1,E]", f"{target}_gate.weight"),
    ]


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architectures={"Qwen2MoeForCausalLM": "Qwen2MoeForCausalLM"},
    model_folder="qwen",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn", bias=True),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *experts(f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"),
        *only_when(shared_expert(f"{TARGET}.shared_expert"), "!shared_inside"),
        *only_when(shared_expert(f"{TARGET}.mlp.shared_expert"), "shared_inside"),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="experts",
    qkv="separate",
    switches={"shared_inside": Switch(since="0.16.0.dev2024111900")},
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    fields=(
        *QWEN_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("qwen_type", "qwen2_moe", "the class chooses its layout by it"),
        attribute("moe_num_experts", "num_experts"),
        attribute("moe_top_k", "experts_per_token"),
        constant("moe_normalization_mode", 0, "the weights of the chosen experts are not normalised"),
        attribute("moe_intermediate_size", "expert_size"),
        attribute("moe_shared_expert_intermediate_size", "shared_expert_size"),
    ),
    requirements=(
        NO_WINDOW,
        Requirement("norm_topk_prob", (False,), False, "expert weights are not normalised", MODEL),
        Requirement("decoder_sparse_step", (1,), 1, "every layer has experts", MODEL),
        Requirement("mlp_only_layers", ([],), [], "every layer has experts", MODEL),
        Requirement("hidden_act", ("silu",), "silu", "experts are gated by silu", MODEL),
    ),
    handled_keys=("qwen_type", "max_window_layers", "layer_types", "sliding_window", "qkv_bias"),
    pipeline=True,
    first_release="0.12.0.dev2024072300",
    head_size_since="0.11.0.dev2024060400",
)
