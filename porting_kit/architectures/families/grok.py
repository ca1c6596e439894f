"""Grok-1: experts gated by GELU, norms before and after both sub-layers, soft-capped attention, scaled logits.

Sources: tensorrt_llm/models/grok/{model,convert}.py, 0.12.0.dev2024070900 to 0.16.0.dev2024121000. Upstream converts
xAI's own checkpoint; the rules here read the PyTorch one (hpcai-tech/grok-1), whose class name MODEL_MAP uses. The
class multiplies embeddings by sqrt(6144) whatever the config says.
"""

from porting_kit.architectures.family import GELU_IS_TANH, Family, Requirement
from porting_kit.architectures.fields import ROPE_FIELDS, attribute, constant, key
from porting_kit.architectures.fragments import LAYER, TARGET, dense, experts, separate_qkv
from porting_kit.architectures.rules import Rule, embedding, output_matrix, rename

MODEL = "tensorrt_llm/models/grok/model.py 0.13.0.dev2024090300"
EMBEDDING_SCALE = 78.38367176906169


def scaled(source: str, target: str, **options: str) -> Rule:
    """An RMSNorm whose weight is called scale."""
    return rename(f"{source}.scale [E]", f"{target}.weight", **options)


def derive_settings(raw: dict, values: dict) -> dict[str, tuple[object, str]]:
    """Attention logits: the class always divides by sqrt(D)."""
    multiplier, standard = raw.get("attn_output_multiplier"), values["head_size"] ** -0.5
    derived = {"attention_softcap": (raw.get("max_attn_value", 30.0), "max_attn_value")}
    if multiplier is not None and abs(multiplier - standard) > 1e-6:
        derived["refuse:attn_output_multiplier"] = (multiplier, f"attention logits are always scaled by {standard:g}")
    return derived


FAMILY = Family(
    name="grok",
    model_types=("grok-1", "grok1"),
    architectures={"Grok1ModelForCausalLM": "Grok1ModelForCausalLM"},
    model_folder="grok",
    rules=(
        embedding("model.embed_tokens.weight"),
        *separate_qkv(f"{LAYER}.attn"),
        *dense(f"{LAYER}.attn.o_proj"),
        *experts(f"{LAYER}.moe_block.gate", f"{LAYER}.moe_block.experts", names=("linear", "linear_v", "linear_1")),
        scaled(f"{LAYER}.pre_attn_norm", f"{TARGET}.input_layernorm"),
        scaled(f"{LAYER}.post_attn_norm", f"{TARGET}.post_attn_layernorm"),
        scaled(f"{LAYER}.pre_moe_norm", f"{TARGET}.post_layernorm"),
        scaled(f"{LAYER}.post_moe_norm", f"{TARGET}.post_mlp_layernorm"),
        scaled("model.norm", "transformer.ln_f", pipeline="last"),
        output_matrix("lm_head.weight", tied_from="model.embed_tokens.weight"),
    ),
    position="rope_gpt_neox",
    norm="rms",
    mlp="experts",
    qkv="separate",
    defaults={"norm_eps": 1e-5, "activation": "gelu", "tied": True},
    derive=derive_settings,
    fields=(
        *ROPE_FIELDS,
        constant("hidden_act", "geglu", "gated experts: the class wants the gated name of gelu"),
        constant("attn_bias", False, "Grok has none"),
        constant("mlp_bias", False, "Grok has none"),
        attribute("max_attn_value", "attention_softcap"),
        key("embedding_multiplier_scale", default=EMBEDDING_SCALE),
        key("output_multiplier_scale", default=0.5773502691896257),
        attribute("moe_num_experts", "num_experts"),
        attribute("moe_top_k", "experts_per_token"),
        constant("moe_normalization_mode", 0, "the weights of the chosen experts are not normalised"),
    ),
    requirements=(
        Requirement(
            "embedding_multiplier_scale",
            (EMBEDDING_SCALE,),
            EMBEDDING_SCALE,
            "embeddings are always multiplied by sqrt(6144)",
            MODEL,
        ),
    ),
    differences=(GELU_IS_TANH,),
    handled_keys=("attn_output_multiplier", "max_attn_value"),
    pipeline=True,
    first_release="0.11.0.dev2024060400",
    head_size_since="0.11.0.dev2024060400",
    broken=(
        (
            "0.11.0.dev2024061800",
            "0.12.0.dev2024070900",
            "its class wants an object `moe` in its config, where a config.json can only put a dict",
        ),
        ("0.14.0.dev2024092400", "0.15.0.dev2024101500", "its class hands the experts' settings on in the wrong order"),
    ),
)
