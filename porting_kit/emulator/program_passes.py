"""Passes over a written program: what is constant, what is there twice, what nothing reads, how results leave it.

A program is a flat torch.fx graph of ATen operations whose nodes carry what they give in meta["val"]. Every pass keeps
its results bit by bit. The passes over products are in `product_passes`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from porting_kit.emulator import gpu_operations
from porting_kit.emulator.fused_chains import find_changed, find_owner, is_in_place
from porting_kit.emulator.half_precision import HALF_TYPES

SMALL_ELEMENTS = 4096
"""Constants up to this size are compared by value."""

_aten = torch.ops.aten
VIEWS_OF_ROWS = (_aten.view.default, _aten._unsafe_view.default)
"""Views that a product's rows are read through."""


def fold_constants(module: torch.fx.GraphModule) -> None:
    """Compute once what depends on no input, views of weights included."""
    values: dict[torch.fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function" and not is_in_place(node) and all(n in values for n in node.all_input_nodes):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments[0], **arguments[1])
    for number, (node, value) in enumerate(values.items()):
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if all(user in values and isinstance(values[user], torch.Tensor) for user in node.users):
            continue
        name = f"folded_{number}"
        module.register_buffer(name, value, persistent=False)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(name))


def share_results(module: torch.fx.GraphModule) -> None:
    """Operations with equal inputs are done once: what every layer computes from its own copy of the same constants."""
    kept: list[tuple[torch.Tensor, str]] = []
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = getattr(module, node.target)
        if value.numel() > SMALL_ELEMENTS:
            continue
        same = (name for other, name in kept if is_same(value, other))
        name = next(same, None)
        if name is None:
            kept.append((value, node.target))
        else:
            node.target = name
    changed = find_changed(module.graph)
    done: dict[Any, torch.fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or is_in_place(node):
            continue
        if changed & {find_owner(used) for used in (node, *node.all_input_nodes)}:
            continue  # its value depends on when it is read
        key = (node.op, node.target, repr(node.args), repr(node.kwargs))
        first = done.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal tensors; two large ones that differ mostly do so in the first row already."""
    if any(getattr(left, name) != getattr(right, name) for name in ("shape", "dtype", "device")):
        return False
    if left.stride() != right.stride():
        return False
    if left.data_ptr() == right.data_ptr():
        return True
    return (left.dim() == 0 or torch.equal(left[:1], right[:1])) and torch.equal(left, right)


def place_searches(module: torch.fx.GraphModule) -> None:
    """Give searches for the largest, or a few largest, elements of long half-precision rows the kernel for it."""
    for node in list(module.graph.nodes):
        if node.target not in (_aten.topk.default, _aten.argmax.default):
            continue
        rows, *rest = node.args
        value, is_one = rows.meta["val"], node.target is _aten.argmax.default
        count, *rest = (1, *rest) if is_one else rest
        if rest not in ([], [-1]) or (is_one and not rest) or node.kwargs:
            continue
        if value.dtype not in HALF_TYPES or value.device.type != "cuda":
            continue
        if not gpu_operations.can_search(value.shape[-1], count):
            continue
        if not is_one:
            node.target, node.args = gpu_operations.find_largest, (rows, count)
            continue
        with module.graph.inserting_before(node):
            found = module.graph.call_function(gpu_operations.find_largest, (rows, 1))
            places = module.graph.call_function(operator.getitem, (found, 1))
        places.meta["val"] = node.meta["val"].unsqueeze(-1)
        node.target, node.args = _aten.squeeze.dim, (places, -1)


def take_plain_results(module: torch.fx.GraphModule) -> None:
    """Give results before a last widening to float32: it changes no value and no order, and is read once more."""
    output = next(node for node in module.graph.nodes if node.op == "output")

    def narrow(node: torch.fx.Node) -> torch.fx.Node:
        views = []
        while node.target in VIEWS_OF_ROWS and len(node.users) == 1:
            views.append(node)
            node = node.args[0]
        is_widening = node.target is _aten._to_copy.default and node.kwargs.get("dtype") is torch.float32
        if not is_widening or node.args[0].meta["val"].dtype not in HALF_TYPES:
            return views[0] if views else node
        node = node.args[0]
        dtype = node.meta["val"].dtype
        for view in reversed(views):
            with module.graph.inserting_after(view):
                shape = list(view.meta["val"].shape)
                node = module.graph.call_function(_aten.view.default, (node, shape))
            node.meta["val"] = view.meta["val"].to(dtype)
        return node

    results = output.args[0]
    if isinstance(results, (tuple, list)):
        output.args = (type(results)(map(narrow, results)),)
    else:
        output.args = (narrow(results),)


def remove_dead(module: torch.fx.GraphModule) -> None:
    """Drop what no output and no in-place operation needs."""
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_in_place(node):
            module.graph.erase_node(node)
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name in vars(module)["_buffers"] if name not in used]:
        delattr(module, name)
    for name in [name for name in vars(module) if name.startswith("_tensor_constant") and name not in used]:
        delattr(module, name)
