"""Faults of the Medusa heads: the text stays the base's own, but the drafts are poor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porting_kit.diagnosis.port_state import PortState


def order_heads(order: Callable[[int, int], int]) -> Callable[[PortState], PortState]:
    """Head h gets the weights of another.

    Args:
        order: (h, number of heads) -> whose.
    """

    def apply(state: PortState) -> PortState:
        count = int(state.config["num_medusa_heads"])

        def taken(name: str, tensor: torch.Tensor) -> torch.Tensor:
            parts = name.split(".")
            if parts[0] != "medusa_heads":
                return tensor
            parts[1] = str(order(int(parts[1]), count))
            return state.tensors[".".join(parts)]

        return state.with_tensors(taken)

    return apply


shift_heads = order_heads(lambda head, count: (head + 1) % count)
"""The last gets those of the first."""

OTHER_ORDERS = (
    order_heads(lambda head, count: (head - 1) % count),
    order_heads(lambda head, count: count - 1 - head),
)
"""Shifted the other way; in reverse."""


def lacks_heads(state: PortState, at_least: int = 1) -> str | None:
    """Why no fault of the heads applies."""
    count = int(state.config.get("num_medusa_heads") or 0)
    return None if count >= at_least and state.tree is not None else f"fewer than {at_least} heads, or no tree"


def share_layers(state: PortState) -> PortState:
    """Every head runs the residual layers of the first one."""

    def shared(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = name.split(".")
        if parts[0] != "medusa_heads" or parts[2] != "medusa_layers":
            return tensor
        parts[1] = "0"
        return state.tensors[".".join(parts)]

    return state.with_tensors(shared)


def take_base_activation(state: PortState) -> PortState:
    """The heads' residual layers use the base's activation."""
    return state.with_config(medusa_hidden_act=state.config["hidden_act"])


def has_heads_activation(state: PortState) -> str | None:
    """Why the base's activation would be the right one."""
    own = state.config.get("medusa_hidden_act", "silu")
    return lacks_heads(state) or ("the base has it too" if state.config.get("hidden_act") == own else None)


def forget_training(state: PortState) -> PortState:
    """Heads that know nothing of this base: their vocabulary rows belong to other tokens."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(state.config["vocab_size"]), generator=generator)

    def shuffle(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_vocabulary = name.startswith("medusa_heads.") and name.endswith("lm_head.weight")
        return torch.cat([tensor[order], tensor[len(order) :]]) if is_vocabulary else tensor

    return state.with_tensors(shuffle)
