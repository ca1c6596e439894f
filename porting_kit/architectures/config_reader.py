"""Takes settings out of a Hugging Face config.json, whatever their spelling, and remembers where each came from.

Two spellings that disagree are refused, a value that is missing is refused unless the family or the general practice
has a default, and every key that was read is noted, so that the rest can be reported. `base_config` gives the result
its type; this module does not read files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from porting_kit.architectures.dtypes import read_dtype
from porting_kit.architectures.family import ByKey, Family, Refusal
from porting_kit.architectures.fields import ACTIVATIONS, IGNORED_KEYS, KNOWN_ACTIVATIONS
from porting_kit.architectures.names import evaluate_dim
from porting_kit.architectures.rope import BASE_KEYS, SHARE_KEYS, Rope, read_rope
from porting_kit.errors import BaseModelError, suggest_nearest

SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_size": ("head_dim", "kv_channels", "attention_head_size"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation"),
    "dtype": ("torch_dtype", "dtype"),
    "tied": ("tie_word_embeddings",),
    "sliding_window": ("sliding_window",),
    "attention_softcap": ("attn_logit_softcapping",),
    "final_softcap": ("final_logit_softcapping",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_size": ("moe_intermediate_size",),
    "shared_expert_size": ("shared_expert_intermediate_size",),
    "rotary_dim": ("rotary_dim",),
    "embedding_size": ("word_embed_proj_dim",),
}
COUNTS = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "intermediate_size", "vocab_size"),
    *("max_positions", "num_experts", "experts_per_token", "expert_size", "shared_expert_size", "rotary_dim"),
    "embedding_size",
)
DEFAULTS: dict[str, object] = {
    "num_kv_heads": "H",
    "head_size": "E//H",
    "intermediate_size": None,
    "max_positions": None,
    "norm_eps": 1e-5,
    "activation": None,
    "dtype": None,
    "tied": False,
    "sliding_window": None,
    "attention_softcap": None,
    "final_softcap": None,
    "num_experts": None,
    "experts_per_token": None,
    "expert_size": "I",
    "shared_expert_size": None,
    "rotary_dim": None,
    "embedding_size": "E",
}
LETTER_OF = {
    "hidden_size": "E",
    "num_layers": "L",
    "num_heads": "H",
    "num_kv_heads": "K",
    "head_size": "D",
    "intermediate_size": "I",
    "expert_size": "J",
    "shared_expert_size": "G",
    "num_experts": "X",
    "vocab_size": "V",
    "max_positions": "S",
    "rotary_dim": "Q",
    "embedding_size": "P",
}


@dataclass(frozen=True)
class Origin:
    """Where an attribute's value came from.

    Args:
        kind: "kept" (a key, unchanged), "derived" (worked out) or "defaulted" (the config is silent).
        key: the config key, None when there is none.
        note: how it was worked out or why the default holds.
    """

    kind: str
    key: str | None = None
    note: str = ""


class ConfigReader:
    """Takes attributes out of a raw config, remembering what was read and from where."""

    def __init__(self, raw: Mapping[str, Any], family: Family, where: str) -> None:
        self.raw, self.family, self.where = raw, family, where
        self.read_keys: set[str] = set()
        self.origins: dict[str, Origin] = {}
        self.values: dict[str, Any] = {}

    def take(self, name: str) -> Any:
        """The value of an attribute: a key of any spelling, the family's default, or the general one."""
        own = self.family.spellings.get(name)
        spellings = own if own is not None else SPELLINGS[name]
        found = [(key, lookup(self.raw, key)) for key in spellings]
        found = [(key, value) for key, value in found if value is not None]
        self.read_keys.update(key.split(".")[0] for key in spellings)
        if own is None and len({_comparable(value) for _, value in found}) > 1:
            raise BaseModelError(
                f"the config states {name} twice, with different values",
                expected="one value",
                found=", ".join(f"{key} = {value!r}" for key, value in found),
                where=self.where,
                next_step="delete the key that is wrong",
            )
        if found:
            self.origins[name] = Origin("kept", found[0][0])
            self.values[name] = found[0][1]
        else:
            self.values[name] = self._default(name, spellings)
        if name in COUNTS and self.values[name] is not None:
            self._check_count(name)
        return self.values[name]

    def _default(self, name: str, spellings: tuple[str, ...]) -> Any:
        if name in self.family.defaults:
            default, whose = self.family.defaults[name], f"the default of {self.family.name} models"
        elif name in DEFAULTS:
            default, whose = DEFAULTS[name], "the general default"
        else:
            raise BaseModelError(
                f"the config lacks {name}",
                expected=f"a key among {list(spellings)}",
                found="no such key",
                where=self.where,
                next_step="complete config.json; nothing is guessed",
            )
        if isinstance(default, str) and name in COUNTS:
            letters = {letter: self.values.get(attribute) for attribute, letter in LETTER_OF.items()}
            known = {letter: value for letter, value in letters.items() if value is not None}
            if name == "head_size" and known["E"] % known["H"]:
                raise BaseModelError(
                    "hidden size is no multiple of the number of heads, and the config states no head size",
                    expected="a hidden size that the heads divide, or a head size",
                    found=f"hidden size {known['E']}, {known['H']} heads",
                    where=self.where,
                    next_step="add head_dim to config.json",
                )
            try:
                self.origins[name] = Origin("derived", None, default)
                return evaluate_dim(default, known)
            except ValueError:
                self.origins[name] = Origin("defaulted", None, "not stated")
                return None
        self.origins[name] = Origin("defaulted", None, whose)
        return default

    def _check_count(self, name: str) -> None:
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise BaseModelError(
                f"{name} is not a positive whole number",
                expected="a whole number above 0",
                found=repr(value),
                where=f"{self.where}: {self.origins[name].key}",
                next_step="correct the key in config.json",
            )


def lookup(raw: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key, None when any part is missing."""
    value: Any = raw
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _comparable(value: object) -> object:
    return value.removeprefix("torch.") if isinstance(value, str) else json.dumps(value, sort_keys=True)


def normalise_config(raw: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The fields of a `BaseConfig` from a raw config of a known family.

    Raises:
        BaseModelError: a value is missing or senseless, or two spellings disagree.
    """
    reader = ConfigReader(raw, family, where)
    for name in SPELLINGS:
        reader.take(name)
    rope = read_rope(raw, where)
    reader.read_keys.update((*BASE_KEYS, *SHARE_KEYS, "rope_scaling", "rope_parameters", "rope_local_base_freq"))
    values = reader.values
    values["position_kind"] = family.position.resolve(raw) if isinstance(family.position, ByKey) else family.position
    if isinstance(family.position, ByKey):
        reader.read_keys.add(family.position.key)
        reader.origins["position_kind"] = Origin("derived", family.position.key, "decided by this key")
    else:
        reader.origins["position_kind"] = Origin("derived", None, f"what {family.name} models use")
    values |= _rope_values(rope, values, family, reader)
    values["q_scaling"] = 1.0
    reader.origins["q_scaling"] = Origin("defaulted", None, "attention logits divided by sqrt(D)")
    derived_switches: dict[str, bool] = {}
    refusals: list[Refusal] = []
    if family.derive is not None:
        for name, (value, how) in family.derive(raw, dict(values)).items():
            if name.startswith("refuse:"):
                source = f"tensorrt_llm/models/{family.model_folder}/model.py"
                refusals.append(Refusal(name.removeprefix("refuse:"), value, how, source))
                continue
            target = derived_switches if name in family.switches else values
            target[name] = value
            reader.origins[f"switch:{name}" if name in family.switches else name] = Origin("derived", None, how)
    if values["dtype"] is not None:
        values["dtype"] = read_dtype(values["dtype"], where)
    _check_activation(raw, values["activation"], family, where)
    _check_heads(values, where)
    switches = {
        name: derived_switches[name] if name in derived_switches else _read_switch(raw, rule, reader, name)
        for name, rule in family.switches.items()
    }
    values["tied"] = bool(values["tied"])
    architectures = raw.get("architectures") or ()
    source_class = next((str(name) for name in architectures if name in family.architectures), None)
    target = family.architectures.get(source_class) or next(iter(family.architectures.values()))
    reader.origins["architecture"] = (
        Origin("kept", "architectures")
        if source_class == target
        else Origin("derived", "architectures", "name in MODEL_MAP")
    )
    return dict(
        family=family.name,
        architecture=target,
        source_architecture=source_class or (str(architectures[0]) if architectures else None),
        model_type=raw.get("model_type"),
        norm_kind=family.norm,
        switches=switches,
        refusals=(*refusals, *_find_refusals(raw, family, reader)),
        origins=reader.origins,
        unread_keys=_unread_keys(raw, family, reader),
        where=where,
        raw=dict(raw),
        **values,
    )


def _rope_values(rope: Rope, values: Mapping[str, Any], family: Family, reader: ConfigReader) -> dict[str, Any]:
    def settle(name: str, found: object, default: object, key: str | None) -> object:
        if found is not None:
            reader.origins[name] = Origin("kept", key)
            return found
        value = family.defaults.get(name, default)
        reader.origins[name] = Origin("defaulted", None, f"the default of {family.name} models")
        return value

    head_size = values["head_size"]
    result = {
        "rope_base": float(settle("rope_base", rope.base, 10000.0, rope.keys.get("base"))),
        "rope_scaling": settle("rope_scaling", rope.scaling, None, rope.keys.get("scaling")),
        "rope_local_base": rope.local_base,
    }
    if values["rotary_dim"] is not None:
        share = values["rotary_dim"] / head_size
        reader.origins["rope_share"] = Origin("derived", "rotary_dim", "rotary_dim / D")
    else:
        share = float(settle("rope_share", rope.share, 1.0, rope.keys.get("share")))
    result["rope_share"] = share
    # the library truncates too: int(head_size * percentage), tensorrt_llm/layers/attention.py 0.9 to 0.13
    result["rotary_dim"] = int(head_size * share)
    reader.origins["rotary_dim"] = Origin("derived", reader.origins["rope_share"].key, "D * rotated share")
    return result


def _read_switch(raw: Mapping[str, Any], rule: Any, reader: ConfigReader, name: str) -> bool | None:
    if rule.since is not None or rule.until is not None:
        return None
    for spelling in rule.keys:
        reader.read_keys.add(spelling.split(".")[0])
        value = lookup(raw, spelling)
        if value is not None:
            reader.origins[f"switch:{name}"] = Origin("kept", spelling)
            return bool(value) != rule.negated
    if rule.evidence is None:
        reader.origins[f"switch:{name}"] = Origin("defaulted", None, "the config is silent")
        return rule.default
    return None


def _check_activation(raw: Mapping[str, Any], stated: object, family: Family, where: str) -> None:
    """Refuse an activation that TensorRT-LLM does not know, and a config that states none by null."""
    rows = [row for row in family.all_fields if row.target == "hidden_act"]
    if all(row.kind == "constant" for row in rows):
        return  # the class has one of its own, whatever the config says; requirements tell where that matters
    spellings = family.spellings.get("activation", SPELLINGS["activation"])
    silent = all(lookup(raw, key) is None for key in spellings)
    if stated is None or (silent and any(key in raw for key in spellings)):
        raise BaseModelError(
            "the config states no activation",
            expected=f"a key among {list(spellings)} with the name of an activation",
            found="null" if any(key in raw for key in spellings) else "no such key",
            where=where,
            next_step="complete config.json; nothing is guessed",
        )
    known = set(KNOWN_ACTIVATIONS) | set(ACTIVATIONS)
    if stated not in known:
        near = suggest_nearest(str(stated), sorted(known))
        raise BaseModelError(
            f"TensorRT-LLM knows no activation {stated!r}",
            expected=f"one of {sorted(known)}",
            found=repr(stated),
            where=where,
            next_step=f"the nearest known name is {near}" if near else "check the key in config.json",
        )


def _check_heads(values: Mapping[str, Any], where: str) -> None:
    if values["num_heads"] % values["num_kv_heads"]:
        raise BaseModelError(
            "query heads do not divide into key/value heads",
            expected="query heads that are a multiple of the key/value heads",
            found=f"{values['num_heads']} query heads on {values['num_kv_heads']} key/value heads",
            where=where,
            next_step="correct the two counts in config.json",
        )
    if values["intermediate_size"] is None:
        raise BaseModelError(
            "the config lacks the width of the MLP",
            expected=f"a key among {list(SPELLINGS['intermediate_size'])}",
            found="no such key",
            where=where,
            next_step="complete config.json; nothing is guessed",
        )
    epsilon = values["norm_eps"]
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < math.inf:
        raise BaseModelError(
            "the norm epsilon is not a finite positive number",
            expected="a finite number, 0 or more",
            found=repr(epsilon),
            where=where,
            next_step="correct the key in config.json",
        )


def _find_refusals(raw: Mapping[str, Any], family: Family, reader: ConfigReader) -> tuple[Refusal, ...]:
    found = []
    quantised = raw.get("quantization_config")
    reader.read_keys.add("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        effect = "its weights are packed; convert the unquantised model and let TensorRT-LLM quantise it"
        found.append(Refusal("quantization_config", method, effect, "examples/quantization 0.13.0.dev2024090300"))
    for requirement in family.requirements:
        if requirement.key.startswith("@"):
            value = reader.values[requirement.key[1:]]
        else:
            reader.read_keys.add(requirement.key.split(".")[0])
            value = lookup(raw, requirement.key)
        value = requirement.default if value is None else value
        allowed = [_allowed_value(item, reader) for item in requirement.allowed]
        if value is not None and value not in allowed:
            found.append(Refusal(requirement.key.removeprefix("@"), value, requirement.effect, requirement.source))
    return tuple(found)


def _allowed_value(item: object, reader: ConfigReader) -> object:
    if isinstance(item, str) and item.startswith("="):
        return evaluate_dim(item[1:], {letter: reader.values[name] for name, letter in LETTER_OF.items()})
    return item


def _unread_keys(raw: Mapping[str, Any], family: Family, reader: ConfigReader) -> tuple[str, ...]:
    read = reader.read_keys | IGNORED_KEYS | set(family.handled_keys)
    read |= {row.source.split(".")[0] for row in family.fields if row.kind == "key"}
    return tuple(sorted(key for key, value in raw.items() if key not in read and value is not None))
