"""Rotary settings of a Hugging Face config, in all their spellings, as one record.

`rope_theta`, `rotary_emb_base`, `rope_scaling {type | rope_type}` and transformers 5's `rope_parameters` (flat, or one
entry per kind of layer) say the same things. Two spellings that disagree are refused: a wrong base passes every
short-prompt test. This module does not know which release expresses which scaling (`ROPE_KINDS` says since when).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from porting_kit.errors import BaseModelError

BASE_KEYS = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base", "rope_embedding_base")
SHARE_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct")
KIND_NAMES = {"su": "longrope", "default": None, "none": None, None: None}

# scaling kind -> (keys it needs, first release whose RotaryScalingType or model code expresses it)
# Source: class RotaryScalingType in tensorrt_llm/functional.py of 0.9.0.dev2024022700, 0.11.0.dev2024062500,
# 0.12.0.dev2024080600 and 0.13.0.dev2024090300; longrope before 0.12 is the position kind long_rope of phi3.
ROPE_KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "linear": (("factor",), "0.8.0"),
    "dynamic": (("factor",), "0.8.0"),
    "longrope": (("short_factor", "long_factor"), "0.10.0"),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "0.12.0.dev2024072301",
    ),
    "yarn": (("factor", "original_max_position_embeddings"), "0.15.0"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary settings.

    Args:
        base: theta; None when the config states none.
        scaling: None, or the scaling's keys with its kind under both `type` and `rope_type`.
        share: part of each head that is rotated, None when the config states none.
        local_base: theta of sliding-window layers where it differs (Gemma 3).
        keys: which config keys were read for "base", "scaling", "share".
    """

    base: float | None = None
    scaling: Mapping[str, object] | None = None
    share: float | None = None
    local_base: float | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def read_rope(raw: Mapping[str, object], where: str) -> Rope:
    """All rotary settings of a config.

    Raises:
        BaseModelError: two spellings disagree, a value is no positive number, a scaling kind is unknown or lacks a key.
    """
    entries = _rope_entries(raw, where)
    base, base_key = _agree(entries, BASE_KEYS, "rotary base", where)
    share, share_key = _agree(entries, SHARE_KEYS, "rotated share of a head", where)
    scaling, scaling_key = _read_scaling(entries, where)
    local = raw.get("rope_local_base_freq")
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get("sliding_attention"), Mapping):
        local = parameters["sliding_attention"].get("rope_theta", local)
    if local is not None:
        _check_number("the rotary base of local layers", local, where)
    if scaling is not None and scaling.get("factor") is not None:
        _check_number(f"{scaling_key.rstrip('.')}: factor", scaling["factor"], where)
    keys = {"base": base_key, "share": share_key, "scaling": scaling_key}
    return Rope(
        base=None if base is None else float(base),
        scaling=scaling,
        share=None if share is None else float(share),
        local_base=None if local is None else float(local),
        keys={name: value for name, value in keys.items() if value},
    )


def _rope_entries(raw: Mapping[str, object], where: str) -> list[tuple[str, Mapping[str, object]]]:
    """(prefix, mapping) pairs to search: the config itself and each nested rope record."""
    entries: list[tuple[str, Mapping[str, object]]] = [("", raw)]
    for name in ("rope_scaling", "rope_parameters"):
        record = raw.get(name)
        if record is None:
            continue
        if not isinstance(record, Mapping):
            raise BaseModelError(
                f"config key {name!r} is not a mapping",
                expected="{...} or null",
                found=repr(record),
                where=where,
                next_step="correct the key in config.json",
            )
        if isinstance(record.get("full_attention"), Mapping):
            entries.append((f"{name}.full_attention.", record["full_attention"]))
        else:
            entries.append((f"{name}.", record))
    return entries


def _agree(
    entries: list[tuple[str, Mapping[str, object]]], keys: tuple[str, ...], subject: str, where: str
) -> tuple[object, str]:
    found = [
        (prefix + name, record[name]) for prefix, record in entries for name in keys if record.get(name) is not None
    ]
    for name, value in found:
        _check_number(name, value, where)
    if len({float(value) for _, value in found}) > 1:
        raise BaseModelError(
            f"the config states the {subject} twice, with different values",
            expected="one value",
            found=", ".join(f"{name} = {value}" for name, value in found),
            where=where,
            next_step="delete the key that is wrong",
        )
    return (found[0][1], found[0][0]) if found else (None, "")


def _check_number(name: str, value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BaseModelError(
            f"{name} is not a positive number",
            expected="a number above 0",
            found=repr(value),
            where=where,
            next_step="correct the key in config.json",
        )


def _read_scaling(
    entries: list[tuple[str, Mapping[str, object]]], where: str
) -> tuple[Mapping[str, object] | None, str]:
    found = []
    for prefix, record in entries:
        if not prefix:
            continue
        named = {name: record[name] for name in ("type", "rope_type") if record.get(name) is not None}
        kinds = {KIND_NAMES.get(kind, kind) for kind in named.values()}
        if len(kinds) > 1:
            raise BaseModelError(
                "the rope scaling names its kind twice, with different values",
                expected="`type` and `rope_type` equal, or only one of them",
                found=", ".join(f"{name} = {value!r}" for name, value in named.items()),
                where=f"{where}: {prefix.rstrip('.')}",
                next_step="delete the key that is wrong",
            )
        kind = next(iter(kinds), None)
        if kind is None:
            continue
        if kind not in ROPE_KINDS:
            raise BaseModelError(
                f"rope scaling of kind {kind!r} has no counterpart in TensorRT-LLM",
                expected=f"one of {sorted(ROPE_KINDS)}",
                found=repr(kind),
                where=f"{where}: {prefix.rstrip('.')}",
                next_step="correct the kind if it is misspelt; a model with other positions cannot be ported",
            )
        values = {
            name: value
            for name, value in record.items()
            if name not in ("type", "rope_type", *BASE_KEYS, *SHARE_KEYS) and value is not None
        }
        if missing := [name for name in ROPE_KINDS[kind][0] if name not in values and name not in entries[0][1]]:
            raise BaseModelError(
                f"rope scaling of kind {kind!r} lacks keys",
                expected=f"{list(ROPE_KINDS[kind][0])}",
                found=f"no {missing}",
                where=f"{where}: {prefix.rstrip('.')}",
                next_step="complete the rope scaling in config.json",
            )
        for name in ROPE_KINDS[kind][0]:
            values.setdefault(name, entries[0][1].get(name))
        found.append((prefix.rstrip("."), {"type": kind, "rope_type": kind, **values}))
    if len(found) > 1 and found[0][1] != found[1][1]:
        raise BaseModelError(
            "the config states the rope scaling twice, with different values",
            expected="one value",
            found=", ".join(f"{name} = {value}" for name, value in found),
            where=where,
            next_step="delete the key that is wrong",
        )
    return (found[0][1], found[0][0]) if found else (None, "")
