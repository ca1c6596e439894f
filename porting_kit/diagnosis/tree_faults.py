"""Faults of the tree's inputs: position offsets, packed mask, and layers that they do not reach."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from porting_kit.diagnosis.faulty_model import FaultyModel
from porting_kit.medusa.tree import MedusaTree, pack_mask

OFFSETS = ("spec_decoding_position_offsets", "medusa_position_offsets")
MASKS = ("spec_decoding_packed_mask", "medusa_packed_mask")


def ignore_offsets(model: Any) -> FaultyModel:
    """Every node of the tree stands at the root's position."""
    return FaultyModel(model, offsets=torch.zeros_like)


def number_offsets(model: Any) -> FaultyModel:
    """Every node has a position of its own, as in plain text: 0, 1, 2, ..."""
    return FaultyModel(model, offsets=lambda offsets: torch.arange(offsets.shape[-1]).to(offsets))


def reverse_mask_bits(model: Any) -> FaultyModel:
    """The first node's bit is read as the last one's."""
    return FaultyModel(model, mask=lambda mask: mask.flip(-1))


def transpose_mask(model: Any) -> FaultyModel:
    """Rows and columns exchanged: a node sees its descendants."""
    return FaultyModel(model, mask=lambda mask: mask.transpose(-1, -2))


def causal_mask(model: Any) -> FaultyModel:
    """The tree's nodes read as plain text: each sees all before it."""
    return FaultyModel(model, mask=lambda mask: torch.ones_like(mask).tril())


def find_depth_first_order(tree: MedusaTree) -> list[int]:
    """Node indices as they come when each path is followed to its end before the next."""
    nodes = list(tree.nodes)
    return sorted(range(len(nodes)), key=lambda index: nodes[index])


def order_depth_first(tree: MedusaTree) -> Callable[[Any], FaultyModel]:
    """The mask belongs to the same nodes listed path by path, the drafts to nodes listed level by level."""
    order = torch.tensor(find_depth_first_order(tree))
    return lambda model: FaultyModel(model, mask=lambda mask: mask[..., order, :][..., order])


def take_mask_of(other: MedusaTree) -> Callable[[Any], FaultyModel]:
    """The mask of another tree with as many nodes."""

    def take(mask: torch.Tensor) -> torch.Tensor:
        return other.mask.to(mask).expand_as(mask)

    return lambda model: FaultyModel(model, mask=take)


def starve_layers(is_starved: Callable[[int, int], bool]) -> Callable[[Any], Any]:
    """Some layers see the drafts as plain text: neither the mask nor the offsets reach them.

    Args:
        is_starved: (layer, number of layers) -> whether it is one of them.
    """

    def change(model: Any) -> Any:
        layers = list(model.module.transformer.layers)
        for index, layer in enumerate(layers):
            if is_starved(index, len(layers)):
                attention = layer.attention
                # A class of its own, because recording sets and removes `forward` on the module.
                attention.__class__ = _starved_class(type(attention))
        return model

    return change


def _starved_class(own: type) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own.forward(self, *args, **{name: _without_tree(name, value) for name, value in kwargs.items()})

    return type(own.__name__, (own,), {"forward": forward})


def _without_tree(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "spec_decoding_params":
        changed = copy.copy(value)
        for field in (*OFFSETS, *MASKS):
            if getattr(value, field, None) is not None:
                setattr(changed, field, _as_plain_text(field, getattr(value, field), value))
        return changed
    return _as_plain_text(name, value, None)


def _as_plain_text(name: str, value: Any, params: Any) -> Any:
    if value is None or name not in (*OFFSETS, *MASKS):
        return value
    data = value.data
    if name in OFFSETS:
        return type(value)(torch.arange(data.shape[-1], dtype=data.dtype).expand_as(data).contiguous())
    # 0.11 and later pack the rows of all requests into one dimension.
    nodes = params.spec_decoding_position_offsets.data.shape[-1] if params is not None else data.shape[-2]
    causal = pack_mask(torch.ones(nodes, nodes, dtype=torch.bool).tril())
    if data.dim() == 3:
        return type(value)(causal.expand_as(data).contiguous())
    return type(value)(causal.repeat(data.shape[0] // nodes, 1))
