"""Snowflake Arctic: a small MLP in the residual stream, and experts that read the input of attention beside it.

Sources: tensorrt_llm/models/llama/{model,config,convert}.py, 0.10.0.dev2024050700 to 0.16.0.dev2024121000. The small
MLP is as wide as the hidden size; every layer has experts.
"""

from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant
from porting_kit.architectures.fragments import LAYER, TARGET, dense, experts, recomputed_frequencies, separate_qkv
from porting_kit.architectures.rules import COLUMN, ROW, embedding, linear, norm, output_matrix

MODEL = "tensorrt_llm/models/llama/model.py 0.14.0.dev2024100800"

FAMILY = Family(
    name="arctic",
    model_types=("arctic",),
    architectures={"ArcticForCausalLM": "ArcticForCausalLM"},
    model_folder="llama",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        *linear(f"{LAYER}.residual_mlp.w1", f"{TARGET}.residual_mlp.fc", "E,E", shard=COLUMN),
        *linear(f"{LAYER}.residual_mlp.w3", f"{TARGET}.residual_mlp.gate", "E,E", shard=COLUMN),
        *linear(f"{LAYER}.residual_mlp.w2", f"{TARGET}.residual_mlp.proj", "E,E", shard=ROW),
        *experts(f"{LAYER}.block_sparse_moe.gate", f"{LAYER}.block_sparse_moe.experts", names=("w1", "w3", "w2")),
        *norm(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        *norm(f"{LAYER}.residual_layernorm", f"{TARGET}.residual_layernorm"),
        *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        *norm("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    drops=(recomputed_frequencies(),),
    position="rope_gpt_neox",
    norm="rms",
    mlp="experts",
    qkv="separate",
    defaults={"norm_eps": 1e-5, "activation": "silu", "tied": False, "rope_base": 1e6},
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "swiglu", "gated experts: the class wants the gated name of silu"),
        constant("attn_bias", False, "Arctic has none"),
        constant("mlp_bias", False, "Arctic has none"),
        constant("residual_mlp", True, "the small MLP beside the experts"),
        attribute("moe_num_experts", "num_experts"),
        attribute("moe_top_k", "experts_per_token"),
        constant("moe_normalization_mode", 1, "the weights of the chosen experts add up to one"),
        constant("moe_tp_mode", 2, "experts are split over the ranks inside, not among them (0.10)"),
    ),
    requirements=(
        Requirement("moe_layer_frequency", (1,), 2, "every layer has experts", MODEL),
        Requirement("parallel_attn_mlp_res", (True,), False, "the small MLP and the experts stand side by side", MODEL),
        Requirement("use_residual", (True,), True, "every layer has the small MLP", MODEL),
        Requirement("hidden_act", ("silu",), "silu", "experts are gated by silu", MODEL),
        Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
    ),
    handled_keys=(
        *("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping"),
        *("enable_expert_tensor_parallelism", "enc_index", "quantization", "num_local_experts", "sliding_window"),
    ),
    pipeline=True,
    first_release="0.10.0.dev2024050700",
    head_size_since="0.10.0.dev2024050700",
)
