"""Negative controls: a fault planted on purpose, so that a pass can be seen to turn into a fail.

Each gate of an alignment has faults that must make it fail. A gate that stays green with its fault planted is broken.
"""

from __future__ import annotations

from collections.abc import Callable

from porting_kit.diagnosis import runtime_faults as runtime
from porting_kit.diagnosis import weight_faults as weights
from porting_kit.diagnosis.catalogue import NAMES, find_fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortFileError, suggest_nearest

_PLANTS: dict[str, Callable[[PortState], PortState]] = {
    "projection_nudged": weights.nudge_projection,
    "rows_of_first_request": lambda state: state.with_wrapper(runtime.use_rows_of_first_request),
    "stale_logits": lambda state: state.with_wrapper(runtime.StaleModel),
}
"""Faults that exist for a control only: no port has them, so the diagnosis does not try them."""

GATE_FAULTS: dict[str, tuple[str, ...]] = {
    "tokens": (
        "alibi_dropped_in_generation",
        "qkv_bias_dropped",
        "rope_base_lost",
        "gate_and_up_swapped",
        "key_and_value_swapped",
    ),
    "logits": ("projection_nudged",),
    "medusa equals greedy": ("mask_transposed", "mask_bits_reversed"),
    "batches": ("rows_of_first_request",),
    "repeat": ("stale_logits",),
    "heads": ("heads_shifted_by_one",),
}
"""Gate -> faults that must make it fail, the most telling first; the first that this port can have is planted."""


def seed_fault(name: str, state: PortState) -> tuple[str, PortState]:
    """Plant a fault in a healthy port.

    Args:
        name: a gate's name, or a fault's.
        state: the healthy port.

    Returns:
        The fault's name and the port with it; `build` gives the model to align.

    Raises:
        PortFileError: no gate or fault has this name, or this port cannot have the fault.
    """
    if name in GATE_FAULTS:
        name = choose_fault(name, state)
    if name in _PLANTS:
        return name, _PLANTS[name](state)
    known = [*GATE_FAULTS, *_PLANTS, *NAMES]
    if name not in NAMES:
        nearest = suggest_nearest(name, known)
        raise PortFileError(
            f"No gate or fault has the name {name!r}",
            expected=", ".join(known),
            found=repr(name),
            next_step=f"Did you mean {nearest!r}?" if nearest else "Name one of them.",
        )
    fault = find_fault(name)
    if (reason := fault.applies(state)) is not None:
        raise PortFileError(
            f"This port cannot have the fault {name!r}",
            expected="a fault that changes something of this port",
            found=reason,
            next_step="Name another fault, or the gate alone.",
        )
    return name, fault.apply(state)


def choose_fault(gate: str, state: PortState) -> str:
    """The first fault of a gate that this port can have.

    Raises:
        PortFileError: it can have none of them.
    """
    reasons = {}
    for name in GATE_FAULTS[gate]:
        reason = None if name in _PLANTS else find_fault(name).applies(state)
        if reason is None:
            return name
        reasons[name] = reason
    raise PortFileError(
        f"No fault of the gate {gate!r} fits this port",
        expected="one of them fits",
        items=[f"{name}: {reason}" for name, reason in reasons.items()],
        next_step="Name a fault of another gate.",
    )
