"""DeepSeek MoE (the first generation): LLaMA with one dense layer, then experts and shared experts.

Sources: tensorrt_llm/models/deepseek_v1/{model,config,convert}.py, 0.14.0.dev2024092400 to 0.16.0.dev2024121000. The
class makes layer 0 dense whatever the config says, and reads the experts' settings from one mapping, until
0.15.0.dev2024101500 from single keys. Until 0.16.0.dev2024111900 experts and shared experts are parts of their own
(layers/moe.py, class SharedMoE).
"""

from dataclasses import replace

from porting_kit.architectures.family import Family, Requirement, Switch
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key, switch
from porting_kit.architectures.fragments import (
    LAYER,
    TARGET,
    dense,
    experts,
    gated_mlp,
    recomputed_frequencies,
    separate_qkv,
)
from porting_kit.architectures.rules import (
    ROW,
    Rule,
    Shard,
    embedding,
    fuse,
    norm,
    only_when,
    output_matrix,
    rename,
    restrict,
)

EXPERTS = f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts"
SHARED = f"{LAYER}.mlp.shared_experts"
NORMALISED = {True: 1, False: 0}
MODEL = "tensorrt_llm/models/deepseek_v1/model.py 0.16.0.dev2024121000"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """The shared experts work as one, as wide as all of them."""
    shared = raw.get("n_shared_experts") or 0
    return {
        "shared_expert_size": (shared * values["expert_size"], "n_shared_experts * moe_intermediate_size"),
        "shared_experts": (shared > 0, "n_shared_experts"),
    }


def shared_experts() -> list[Rule]:
    """[up; gate] in one matrix."""
    return [
        fuse(
            [f"{SHARED}.up_proj.weight [G,E]", f"{SHARED}.gate_proj.weight [G,E]"],
            f"{TARGET}.mlp.shared_expert.fc.weight",
            shard=Shard(0, blocks=("G", "G")),
        ),
        rename(f"{SHARED}.down_proj.weight [E,G]", f"{TARGET}.mlp.shared_expert.proj.weight", shard=ROW),
    ]


def shared_experts_apart() -> list[Rule]:
    """Three matrices."""
    rules = gated_mlp(SHARED, width="G")
    return [replace(rule, target=rule.target.replace(".mlp.", ".mlp.shared_experts.")) for rule in rules]


FAMILY = Family(
    name="deepseek_v1",
    model_types=("deepseek",),
    architectures={"DeepseekForCausalLM": "DeepseekForCausalLM"},
    model_folder="deepseek_v1",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *restrict(gated_mlp(f"{LAYER}.mlp"), "0", "1"),
        *only_when(restrict(experts(*EXPERTS), "1", "L"), "!parts_apart"),
        *only_when(restrict(experts(*EXPERTS, target=f"{TARGET}.mlp.moe"), "1", "L"), "parts_apart"),
        *only_when(restrict(shared_experts(), "1", "L"), "shared_experts & !parts_apart"),
        *only_when(restrict(shared_experts_apart(), "1", "L"), "shared_experts & parts_apart"),
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
    switches={
        "normalised_experts": Switch(("norm_topk_prob",), default=False),
        "shared_experts": Switch(),
        "parts_apart": Switch(since="0.14.0.dev2024092400", until="0.16.0.dev2024111900"),
        "single_keys": Switch(since="0.14.0.dev2024092400", until="0.15.0.dev2024101500"),
    },
    defaults={"norm_eps": 1e-6, "activation": "silu", "tied": False},
    derive=derive_sizes,
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        attribute("moe_intermediate_size", "expert_size", when="!parts_apart"),
        attribute("moe.num_experts", "num_experts", when="!single_keys"),
        attribute("moe.top_k", "experts_per_token", when="!single_keys"),
        attribute("moe.shared_expert_intermediate_size", "shared_expert_size", when="!parts_apart"),
        attribute("moe.moe_intermediate_size", "expert_size", when="parts_apart & !single_keys"),
        key("moe.num_shared_experts", "n_shared_experts", 0, when="parts_apart & !single_keys"),
        switch("moe.normalization_mode", "normalised_experts", mapping=NORMALISED, when="!single_keys"),
        attribute("moe_num_experts", "num_experts", when="single_keys"),
        attribute("moe_top_k", "experts_per_token", when="single_keys"),
        attribute("moe_inter_size", "expert_size", when="single_keys"),
        key("moe_num_shared_experts", "n_shared_experts", 0, when="single_keys"),
        switch("moe_renorm_mode", "normalised_experts", mapping=NORMALISED, when="single_keys"),
    ),
    requirements=(
        Requirement("first_k_dense_replace", (1,), 1, "layer 0 alone is dense", MODEL),
        Requirement("moe_layer_freq", (1,), 1, "every layer after the first has experts", MODEL),
        Requirement("scoring_func", ("softmax",), "softmax", "experts are scored by softmax", MODEL),
        Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
    ),
    handled_keys=("n_shared_experts", "aux_loss_alpha", "seq_aux", "norm_topk_prob"),
    pipeline=True,
    first_release="0.14.0.dev2024092400",
)
