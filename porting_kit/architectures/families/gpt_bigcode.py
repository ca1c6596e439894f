"""GPTBigCode (StarCoder, SantaCoder): GPT-2 with plain linear layers and one key/value head.

Sources: tensorrt_llm/models/gpt/{model,config,convert}.py, 0.9.0.dev2024031900 to 0.16.0.dev2024121000.
"""

from porting_kit.architectures.families.gpt2 import GPT2_REQUIREMENTS, GPT_FIELDS, NO_ROPE
from porting_kit.architectures.family import Family, Switch
from porting_kit.architectures.fields import constant
from porting_kit.architectures.fragments import (
    HEAD_BY_HEAD,
    TARGET,
    built_in_masks,
    dense,
    fused_qkv,
    plain_mlp,
)
from porting_kit.architectures.rules import embedding, norm, output_matrix, rename

SOURCE = "transformer.h.{i}"


def derive_sizes(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """One key/value head unless `multi_query` is off; then heads are stored one by one."""
    if raw.get("multi_query", True):
        return {"num_kv_heads": (1, "multi_query")}
    return {"num_kv_heads": (values["num_heads"], "H")}


FAMILY = Family(
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    architectures={"GPTBigCodeForCausalLM": "GPTForCausalLM"},
    model_folder="gpt",
    rules=(
        embedding("transformer.wte.weight"),
        rename("transformer.wpe.weight [S,E]", "transformer.position_embedding.weight", pipeline="first"),
        *fused_qkv(f"{SOURCE}.attn.c_attn", bias=True, when="multi_query"),
        *fused_qkv(f"{SOURCE}.attn.c_attn", HEAD_BY_HEAD, bias=True, when="!multi_query"),
        *dense(f"{SOURCE}.attn.c_proj", bias=True),
        *plain_mlp(f"{SOURCE}.mlp.c_fc", f"{SOURCE}.mlp.c_proj", bias=True),
        *norm(f"{SOURCE}.ln_1", f"{TARGET}.input_layernorm", bias=True),
        *norm(f"{SOURCE}.ln_2", f"{TARGET}.post_layernorm", bias=True),
        *norm("transformer.ln_f", "transformer.ln_f", bias=True, pipeline="last"),
        output_matrix("lm_head.weight", tied_from="transformer.wte.weight"),
    ),
    drops=built_in_masks(f"{SOURCE}.attn"),
    position="learned_absolute",
    norm="layer",
    mlp="plain",
    qkv="one matrix, Q; K; V (head by head without multi_query)",
    switches={"multi_query": Switch(("multi_query",), default=True)},
    defaults={"intermediate_size": "4*E", "tied": True, "activation": "gelu_pytorch_tanh"},
    spellings={"max_positions": ("n_positions", "max_position_embeddings")},
    derive=derive_sizes,
    fields=(
        constant("gpt_variant", "starcoder", "the layout"),
        constant("bias", True, "all linear layers have biases"),
        constant("qk_layernorm", False, "GPTBigCode has none"),
        *GPT_FIELDS,
        *NO_ROPE,
    ),
    requirements=GPT2_REQUIREMENTS,
    handled_keys=("n_ctx", "num_key_value_heads", "validate_runner_input", "attention_softmax_in_fp32"),
    pipeline=True,
    head_size_since="0.12.0.dev2024071600",
    first_release="0.9.0.dev2024031900",
)
