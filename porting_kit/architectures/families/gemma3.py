"""Gemma 3 (text): Gemma 2's norms, norms on queries and keys, two rotary bases, five sliding layers in six.

Sources: tensorrt_llm/models/gemma/{model,config}.py, 0.20 to 1.1. Earlier versions read `_sliding_window_pattern`,
later ones `layer_types`; both are written.
"""

from porting_kit.architectures.families.gemma import HANDLED, norm_from_one
from porting_kit.architectures.families.gemma2 import derive_scale
from porting_kit.architectures.family import Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key
from porting_kit.architectures.fragments import LAYER, TARGET, dense, gated_mlp, separate_qkv
from porting_kit.architectures.operations import Add
from porting_kit.architectures.rules import COLUMN, output_matrix, rename, transform

MODEL = "tensorrt_llm/models/gemma/model.py 1.0"


def derive_settings(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """The scale of the attention logits, and how often a layer sees the whole past."""
    derived = derive_scale(raw, values)
    local = values["rope_local_base"]
    derived["rope_local_base"] = (10000.0 if local is None else local, "base of the sliding layers")
    return derived


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    architectures={
        "Gemma3ForCausalLM": "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    },
    model_folder="gemma",
    rules=(
        rename("model.embed_tokens.weight [V,E]", "transformer.vocab_embedding.weight", shard=COLUMN, pipeline="first"),
        output_matrix("lm_head.weight", "model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.self_attn"),
        *dense(f"{LAYER}.self_attn.o_proj"),
        transform(f"{LAYER}.self_attn.q_norm.weight [D]", f"{TARGET}.attention.q_layernorm.weight", Add(1.0)),
        transform(f"{LAYER}.self_attn.k_norm.weight [D]", f"{TARGET}.attention.k_layernorm.weight", Add(1.0)),
        *gated_mlp(f"{LAYER}.mlp"),
        norm_from_one(f"{LAYER}.input_layernorm", f"{TARGET}.input_layernorm"),
        norm_from_one(f"{LAYER}.post_attention_layernorm", f"{TARGET}.post_layernorm"),
        norm_from_one(f"{LAYER}.pre_feedforward_layernorm", f"{TARGET}.pre_feedforward_layernorm"),
        norm_from_one(f"{LAYER}.post_feedforward_layernorm", f"{TARGET}.post_feedforward_layernorm"),
        norm_from_one("model.norm", "transformer.ln_f", pipeline="last"),
    ),
    position="rope_gpt_neox",
    norm="rms",
    mlp="gated",
    qkv="separate",
    spellings={"activation": ("hidden_activation", "hidden_act")},
    defaults={
        "norm_eps": 1e-6,
        "activation": "gelu_pytorch_tanh",
        "tied": True,
        "rope_base": 1e6,
        "head_size": 256,
        "vocab_size": 262208,
        "num_heads": 8,
        "num_kv_heads": 4,
    },
    derive=derive_settings,
    fields=(
        *ROPE_FIELDS,
        constant("attn_bias", False, "Gemma has none"),
        constant("mlp_bias", False, "Gemma has none"),
        constant("inter_layernorms", True, "norms after attention and MLP too"),
        constant("qk_layernorm", True, "queries and keys are normalised"),
        key("query_pre_attn_scalar", default=256),
        attribute("final_logit_softcapping", "final_softcap"),
        attribute("rope_local_base_freq", "rope_local_base"),
        attribute("sliding_window"),
        key("_sliding_window_pattern", default=6),
        key("layer_types", default=None),
    ),
    requirements=(
        Requirement("attention_bias", (False,), False, "no projection has a bias", MODEL),
        Requirement("attn_logit_softcapping", (None,), None, "the attention logits are not capped", MODEL),
        Requirement("use_bidirectional_attention", (False,), False, "attention is always causal", MODEL),
        Requirement("@tied", (True,), True, "the output matrix is the embedding", MODEL),
    ),
    handled_keys=tuple(name for name in HANDLED if name not in ("sliding_window", "layer_types")),
    pipeline=True,
    first_release="0.20.0",
    head_size_since="0.20.0",
)
