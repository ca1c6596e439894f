"""Faults of the model's code: values that a module got wrong, changed on the built model.

`model.py` may ignore what config.json says, so these are set on the modules themselves and not in the config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porting_kit.diagnosis.port_state import PortState

ACTIVATIONS = {"silu": "gelu", "swiglu": "gelu"}
STYLES = {"rope_gpt_neox": "rope_gptj", "rope_gptj": "rope_gpt_neox"}
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ERF_GELU = "gelu_erf"
EPSILONS = (1e-5, 1e-6, 1e-12)
SAME = 0.5
"""An epsilon within this factor of the right one is no fault."""


def set_activation(model: Any) -> Any:
    """The base's MLPs run another activation: SiLU where the base has another, GELU where it has SiLU."""
    for module in base_modules(model):
        kind = getattr(module, "hidden_act", None)
        if isinstance(kind, str):
            module.hidden_act = ACTIVATIONS.get(kind, "silu")
    return model


def set_relu(model: Any) -> Any:
    """The base's MLPs run ReLU."""
    for module in base_modules(model):
        if isinstance(getattr(module, "hidden_act", None), str):
            module.hidden_act = "relu"
    return model


def set_erf_gelu(model: Any) -> Any:
    """The base's MLPs run the erf form of GELU, which the library does not have: its own table gets one more entry.

    Modules that fix their activation say gelu, which is the tanh form there.
    """
    for module in base_modules(model):
        known = type(module).forward.__globals__.get("ACT2FN")
        if known is not None and getattr(module, "hidden_act", None) in ("gelu", *TANH_GELUS):
            known[ERF_GELU] = _erf_gelu
            module.hidden_act = ERF_GELU
    return model


def _erf_gelu(value: Any) -> Any:
    return type(value)(torch.nn.functional.gelu(value.data))


def lacks_tanh_gelu(state: PortState) -> str | None:
    """Why the erf form would be no fault."""
    own = state.config.get("hidden_act")
    return None if own in TANH_GELUS else f"the base's activation is {own}"


def set_epsilon(value: float) -> Callable[[Any], Any]:
    """Every norm runs with this epsilon."""

    def change(model: Any) -> Any:
        for module in base_modules(model):
            if isinstance(getattr(module, "eps", None), float):
                module.eps = value
        return model

    return change


def wrong_epsilons(state: PortState) -> list[float]:
    """The epsilons that would be wrong for this port, the nearest first."""
    own = float(state.config.get("norm_epsilon") or 1e-5)
    return sorted((value for value in EPSILONS if abs(value / own - 1) > SAME), key=lambda value: abs(value - own))


def apply_epsilon(place: int) -> Callable[[PortState], PortState]:
    """The fault with the wrong epsilon of this place."""
    return lambda state: state.with_wrapper(set_epsilon(wrong_epsilons(state)[place]))


def base_modules(model: Any) -> list[Any]:
    """Every module but those of the Medusa heads."""
    return [module for name, module in model.module.named_modules() if "medusa" not in name]


def swap_rotary_style(state: PortState) -> PortState:
    """Halves of a head paired in place of neighbours, or the reverse; `model.py` may fix the style, so both are set."""
    kind = str(state.config["position_embedding_type"])
    return state.with_config(position_embedding_type=STYLES[kind]).with_wrapper(_set_style)


def _set_style(model: Any) -> Any:
    wanted = model.config["position_embedding_type"]
    for module in base_modules(model):
        own = getattr(module, "position_embedding_type", None)
        if getattr(own, "name", None) in STYLES:
            module.position_embedding_type = type(own)[wanted]
    return model


def lacks_rotary_style(state: PortState) -> str | None:
    """Why there is no style to swap."""
    kind = str(state.config.get("position_embedding_type"))
    return None if kind in STYLES else f"positions are {kind}"


def scale_embedding(state: PortState) -> PortState:
    """Gemma's factor sqrt(E) on the embedding missing, or put where it does not belong.

    What the embedding gives is scaled and not its weights: where the table is shared, the output matrix reads it too.
    """
    root = float(state.config["hidden_size"]) ** 0.5
    factor = 1 / root if str(state.config.get("architecture")).startswith("Gemma") else root

    def change(model: Any) -> Any:
        for name, module in model.module.named_modules():
            if name.endswith("vocab_embedding"):
                # A class of its own, because recording sets and removes `forward` on the module.
                module.__class__ = _scaled_class(type(module), factor)
        return model

    return state.with_wrapper(change)


def _scaled_class(own: type, factor: float) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own.forward(self, *args, **kwargs) * factor

    return type(own.__name__, (own,), {"forward": forward})


def drop_alibi(model: Any) -> Any:
    """Attention modules that know nothing of ALiBi, in any phase."""
    for module in base_modules(model):
        own = getattr(module, "position_embedding_type", None)
        if str(getattr(own, "name", "")).startswith("alibi"):
            module.position_embedding_type = type(own)["learned_absolute"]
    return model


def lacks_alibi(state: PortState) -> str | None:
    """Why no ALiBi bias can be missing."""
    kind = str(state.config.get("position_embedding_type"))
    return None if "alibi" in kind else f"positions are {kind}"
