"""GPT-2: learned positions, transposed linear layers (Conv1D), tied embeddings.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.9.0.dev2024031900 to 0.16.0.dev2024121000. The
architecture is written as GPTForCausalLM, the one name that every release's MODEL_MAP holds.
"""

from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import constant
from porting_kit.architectures.fragments import TARGET, built_in_masks, conv1d
from porting_kit.architectures.rules import COLUMN, QKV, REPLICATED, ROW, embedding, norm, output_matrix, rename

SOURCE = "transformer.h.{i}"
MODEL = "tensorrt_llm/models/gpt/model.py 0.11.0.dev2024062500"
GPT_FIELDS = (
    constant("q_scaling", 1.0, "attention logits are divided by sqrt(D)"),
    constant("apply_query_key_layer_scaling", False, "no layer has a scale of its own"),
    constant("embedding_scale", None, "embeddings are not scaled"),
    constant("inner_layernorm", False, "only Kosmos-2 has one"),
    constant("norm_before_bmm1", False, "only Kosmos-2 asks for it"),
    constant("moe_num_experts", 0, "no experts"),
    constant("moe_top_k", 0, "no experts"),
    constant("moe_normalization_mode", 1, "no experts"),
    constant("moe_tp_mode", 2, "no experts"),
)
NO_ROPE = (
    constant("rotary_pct", 0.0, "positions are learned"),
    constant("rotary_base", 10000.0, "positions are learned"),
    constant("rotary_scaling", None, "positions are learned"),
)
GPT2_REQUIREMENTS = (
    Requirement("scale_attn_weights", (True,), True, "attention logits are always divided by sqrt(D)", MODEL),
    Requirement("scale_attn_by_inverse_layer_idx", (False,), False, "no layer has a scale of its own", MODEL),
    Requirement("add_cross_attention", (False,), False, "the class has no cross-attention", MODEL),
)

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    architectures={"GPT2LMHeadModel": "GPTForCausalLM", "GPT2LMHeadCustomModel": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("transformer.wte.weight"),
        rename("transformer.wpe.weight [S,E]", "transformer.position_embedding.weight", pipeline="first"),
        *conv1d(f"{SOURCE}.attn.c_attn", f"{TARGET}.attention.qkv", "3*E", "E", shard=QKV, bias_shard=QKV),
        *conv1d(f"{SOURCE}.attn.c_proj", f"{TARGET}.attention.dense", "E", "E", shard=ROW, bias_shard=REPLICATED),
        *conv1d(f"{SOURCE}.mlp.c_fc", f"{TARGET}.mlp.fc", "I", "E", shard=COLUMN, bias_shard=COLUMN),
        *conv1d(f"{SOURCE}.mlp.c_proj", f"{TARGET}.mlp.proj", "E", "I", shard=ROW, bias_shard=REPLICATED),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.ln_2", f"{TARGET}.post_layernorm", bias=True),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    drops=built_in_masks(f"{SOURCE}.attn"),
    position="learned_absolute",
    norm="layer",
    mlp="plain",
    qkv="one matrix, Q; K; V, transposed",
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "gelu_new"},
    spellings={"max_positions": ("n_positions", "max_position_embeddings")},
    fields=(
        constant("gpt_variant", "gpt2", "the layout"),
        constant("bias", True, "all linear layers have biases"),
        constant("qk_layernorm", False, "GPT-2 has none"),
        *GPT_FIELDS,
        *NO_ROPE,
    ),
    requirements=GPT2_REQUIREMENTS,
    handled_keys=("n_ctx", "reorder_and_upcast_attn"),
    pipeline=True,
    head_size_since="0.12.0.dev2024071600",
    first_release="0.9.0.dev2024031900",
)
