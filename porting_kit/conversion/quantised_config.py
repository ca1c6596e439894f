"""The config of a quantised checkpoint against its base's: what it states otherwise, and what it leaves out.

For a field that is left out the library takes a default of its own without a word: nvidia-modelopt 0.47.0 beside
transformers 5 writes no `rotary_base`, and a base with another one than 10,000 then runs with wrong positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.conversion.quantised import QuantisedFault

STRUCTURE = (
    "architecture",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_size",
    "intermediate_size",
)
"""Where these differ the tensors are of another model, and are not compared."""
QUANTISERS_OWN = frozenset(
    {
        "dtype",
        "logits_dtype",
        "use_parallel_embedding",
        "embedding_sharding_dim",
        "share_embedding_table",
        "quantization",
        "mapping",
        "max_draft_len",
        "max_medusa_token_len",
        "medusa_hidden_act",
    }
)
"""What a quantiser may choose; the comparison of the tensors follows it."""
DEFAULTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_key_value_heads": lambda config: config.get("num_attention_heads"),
    "head_size": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "intermediate_size": lambda config: 4 * config["hidden_size"],
    "hidden_act": lambda config: "gelu",
    "norm_epsilon": lambda config: 1e-5,
    "position_embedding_type": lambda config: "learned_absolute",
    "rotary_base": lambda config: 10000.0,
    "rotary_scaling": lambda config: None,
    "rotary_pct": lambda config: 1.0,
    "attn_bias": lambda config: False,
    "mlp_bias": lambda config: False,
    "residual_mlp": lambda config: False,
}
"""What the library takes for a field that is absent (models/modeling_utils.py and models/llama/config.py,
0.13.0.dev2024090300; models/llama/model.py, 0.8.0)."""
CLASS_DEFAULTS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("QWen", "Qwen"): {"attn_bias": True},
    ("Gemma2",): {"query_pre_attn_scalar": None, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ("Cohere",): {"output_multiplier_scale": 0.0625},
    ("GPTJ",): {"rotary_dim": 64},
    ("Falcon", "RW"): {"bias": False, "parallel_attention": False, "new_decoder_architecture": False},
    ("GPTForCausalLM",): {
        "gpt_variant": "gpt2",
        "bias": True,
        "q_scaling": 1.0,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
    },
    ("ChatGLM",): {
        "chatglm_version": "chatglm3",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": False,
        "apply_residual_connection_post_layernorm": False,
        "rmsnorm": True,
        "rotary_pct": 0.5,
    },
}
"""Beginnings of class names, and what their own config classes take otherwise (models/*/config.py,
0.13.0.dev2024090300). Of a field that is in neither table the release's own source is asked; where that does not say
either, the field is listed as not judged."""
NO_RELEASE: Mapping[str, Any] = {}
SAME_ACTIVATION = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "openai-gelu": "gelu",
    "geglu": "gelu",
    "swiglu": "silu",
    "fast-swiglu": "silu",
}
"""Names of one function, gated or not (ACT2FN and GATED_ACT_2_ACT in functional.py, 0.13.0.dev2024090300)."""
WITHOUT_ROTARY = ("learned_absolute", "alibi", "alibi_with_scale", "relative")
MEDUSA_ARCHITECTURE = "MedusaForCausalLM"
MEDUSA_BASES = ("llama", "qwen", "qwen2", "qwen2_moe")
"""Families that the library's own Medusa class is made of (models/medusa/model.py, 0.8 to 1.2)."""
TOLERANCE = 1e-6
"""Relative: a norm's epsilon goes through float32 on its way into a file."""


def compare_config(
    stated: Mapping[str, Any],
    converted: Mapping[str, Any],
    base: BaseConfig,
    release: Mapping[str, Any] = NO_RELEASE,
) -> tuple[QuantisedFault, ...]:
    """Fields in which a checkpoint's config makes another model of its tensors than its base is; kind `config`.

    Args:
        stated: the checkpoint's config.
        converted: what the conversion of the base writes.
        base: the base's settings.
        release: field -> what a release's own source says it takes, for fields that are in no table here.
    """
    found = []
    known = {**_find_defaults(stated, converted, release), **stated}
    for name, wanted in converted.items():
        if name in QUANTISERS_OWN or name not in known or not _matters(name, converted):
            continue
        value = known[name]
        if _is_alike(name, value, wanted, base, stated):
            continue
        text = f"{name} is {value!r}" if name in stated else f"{name} is absent, for which the library takes {value!r}"
        text += f": the base's is {wanted!r}"
        if name == "vocab_size" and isinstance(value, int) and value > wanted:
            text += ", and a row of zeros behind it wins wherever all other logits are negative"
        found.append(QuantisedFault("config", name, text))
    if stated.get("share_embedding_table") is True and not base.tied and not base.architecture.startswith("Gemma"):
        text = "share_embedding_table is True: the base's embedding and output matrix are two, and would be made one"
        found.append(QuantisedFault("config", "share_embedding_table", text))
    return tuple(found)


def list_unjudged_fields(
    stated: Mapping[str, Any], converted: Mapping[str, Any], release: Mapping[str, Any] = NO_RELEASE
) -> tuple[str, ...]:
    """Fields of the base that the checkpoint's config leaves out and of which no default is known, by name."""
    known = {*_find_defaults(stated, converted, release), *stated, *QUANTISERS_OWN}
    return tuple(name for name in converted if name not in known and _matters(name, converted))


def _find_defaults(
    stated: Mapping[str, Any], converted: Mapping[str, Any], release: Mapping[str, Any]
) -> dict[str, Any]:
    """Field -> what the library takes for it where it is absent."""
    common = {name: make(stated) for name, make in DEFAULTS.items()}
    return {**release, **common, **_class_defaults(str(converted.get("architecture")))}


def _class_defaults(architecture: str) -> Mapping[str, Any]:
    return next((known for names, known in CLASS_DEFAULTS.items() if architecture.startswith(names)), {})


def _matters(name: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a field has a meaning for this base.

    The largest position is a limit of the build, unless the rotary factors are made with it; without rotary factors
    nothing is read of them, and converters write what they like.
    """
    if name == "max_position_embeddings":
        return bool(wanted.get("rotary_scaling"))
    return not (name.startswith("rotary_") and wanted.get("position_embedding_type") in WITHOUT_ROTARY)


def _is_alike(name: str, value: Any, wanted: Any, base: BaseConfig, stated: Mapping[str, Any]) -> bool:
    if name == "architecture":
        return value in _architecture_names(base, bool(stated.get("num_medusa_heads")))
    if name == "hidden_act":
        return SAME_ACTIVATION.get(value, value) == SAME_ACTIVATION.get(wanted, wanted)
    if name == "rotary_scaling":
        return _is_same_scaling(value, wanted)
    if _is_number(value) and _is_number(wanted):
        return math.isclose(value, wanted, rel_tol=TOLERANCE)
    return value == wanted


def _architecture_names(base: BaseConfig, has_heads: bool) -> set[str]:
    """Names under which the library has the base's class; from 0.16 on also Hugging Face's (models/__init__.py)."""
    names = {base.architecture, *base.definition.architectures, *base.definition.architectures.values()}
    if base.definition.renamed is not None:
        names.add(base.definition.renamed[1])
    if has_heads and base.family in MEDUSA_BASES:
        names.add(MEDUSA_ARCHITECTURE)
    return names


def _is_same_scaling(value: Any, wanted: Any) -> bool:
    """Two rotary scalings, whichever of the two keys names the kind; what the base does not state is not compared."""
    ours, theirs = _read_scaling(wanted), _read_scaling(value)
    if not ours or not theirs:
        return not ours and not theirs
    return all(
        math.isclose(theirs[key], item, rel_tol=TOLERANCE)
        if _is_number(item) and _is_number(theirs.get(key))
        else theirs.get(key) == item
        for key, item in ours.items()
    )


def _read_scaling(scaling: Any) -> dict[str, Any]:
    found = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = found.pop("type", None) or found.pop("rope_type", None)
    found.pop("rope_type", None)
    return {} if kind in (None, "default") else {"type": kind, **found}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
