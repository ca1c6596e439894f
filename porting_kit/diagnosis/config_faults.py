"""Faults of config.json: values that a converter loses, misreads or fills with a default."""

from __future__ import annotations

from typing import Any

from porting_kit.diagnosis.port_state import PortState

DEFAULT_ROPE_BASE = 10000.0
ROPE_BASE_KEYS = ("rotary_base", "rotary_emb_base")
SHARE_KEYS = ("rotary_pct", "partial_rotary_factor")


def lose_rope_base(state: PortState) -> PortState:
    """The rotary base falls back to 10,000."""
    return state.with_config(**{key: DEFAULT_ROPE_BASE for key in ROPE_BASE_KEYS if key in state.config})


def keeps_default_rope_base(state: PortState) -> str | None:
    """Why losing the base would change nothing."""
    bases = [state.config[key] for key in ROPE_BASE_KEYS if state.config.get(key) is not None]
    if not bases or "rope" not in str(state.config.get("position_embedding_type")):
        return "no rotary base in the config"
    return None if any(float(base) != DEFAULT_ROPE_BASE for base in bases) else "the base is 10,000"


def lose_scaling(state: PortState) -> PortState:
    """Rotary scaling is left out."""
    return state.with_config(rotary_scaling=None)


def misread_scaling(state: PortState) -> PortState:
    """The type is kept and the factor lost, or, where there is more than a factor, only type linear and factor kept."""
    return state.with_config(rotary_scaling=_misread(dict(state.config["rotary_scaling"])))


def _misread(scaling: dict[str, Any]) -> dict[str, Any]:
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind in ("linear", "dynamic"):
        other = "dynamic" if kind == "linear" else "linear"
        return {**scaling, "type": other, "rope_type": other}
    return {"type": "linear", "rope_type": "linear", "factor": scaling.get("factor", 1.0)}


def lacks_scaling(state: PortState) -> str | None:
    """Why no scaling can be lost."""
    return None if state.config.get("rotary_scaling") else "no rotary scaling in the config"


def ignore_rotary_share(state: PortState) -> PortState:
    """Every dimension of a head is rotated."""
    changes: dict[str, Any] = {key: 1.0 for key in SHARE_KEYS if state.config.get(key) is not None}
    if state.config.get("rotary_dim"):
        changes["rotary_dim"] = int(state.config["head_size"])
    return state.with_config(**changes)


def lacks_rotary_share(state: PortState) -> str | None:
    """Why no share can be ignored."""
    partial = any(float(state.config.get(key) or 1.0) < 1.0 for key in SHARE_KEYS)
    partial |= 0 < int(state.config.get("rotary_dim") or 0) < int(state.config.get("head_size") or 0)
    return None if partial else "all dimensions are rotated"


def drop_window(state: PortState) -> PortState:
    """Every token sees all before it."""
    return state.with_window(None)


def lacks_window(state: PortState) -> str | None:
    """Why no window can be ignored."""
    return None if state.attention_window else "no sliding window"
