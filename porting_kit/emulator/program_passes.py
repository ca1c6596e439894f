"""Passes over a written program: what is constant, what is there twice, which kernel serves which operation.

A program is a flat torch.fx graph of ATen operations whose nodes carry what they give in meta["val"]. Every pass keeps
its results: bit by bit, but for sums of products, whose order is the kernel's own.
"""

from __future__ import annotations

from typing import Any

import torch

from porting_kit.emulator import gpu_operations
from porting_kit.emulator.fused_chains import find_changed, find_owner, is_in_place
from porting_kit.emulator.half_precision import HALF_TYPES

PACKED_ROWS = range(2, 33)
"""Rows of a product for which a laid-out weight is faster (measured on AVX2: 1.0 to 1.7 times)."""

PACKED_BYTES = 2 << 30
"""Laid-out copies of weights a program may hold."""

SMALL_ELEMENTS = 4096
"""Constants up to this size are compared by value."""

_aten = torch.ops.aten
_CUTS = (_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default)
_VIEWS_OF_ROWS = (_aten.view.default, _aten._unsafe_view.default)


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
        same = (name for other, name in kept if _is_same(value, other))
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


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal tensors; two large ones that differ mostly do so in the first row already."""
    if any(getattr(left, name) != getattr(right, name) for name in ("shape", "dtype", "device")):
        return False
    if left.stride() != right.stride():
        return False
    if left.data_ptr() == right.data_ptr():
        return True
    return (left.dim() == 0 or torch.equal(left[:1], right[:1])) and torch.equal(left, right)


def share_products(module: torch.fx.GraphModule) -> None:
    """Products of one weight with several single inputs become one product: heads that share the base's matrix.

    A checkpoint holds the shared matrix once a head, so weights are compared by value.
    """
    by_weight: list[tuple[torch.Tensor, list[torch.fx.Node]]] = []
    for node in module.graph.nodes:
        if node.target is _aten.mm.default and node.args[1].op == "get_attr":
            weight = getattr(module, node.args[1].target)
            nodes = next((nodes for other, nodes in by_weight if _is_same(weight, other)), None)
            if nodes is None:
                by_weight.append((weight, nodes := []))
            nodes.append(node)
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for _, nodes in by_weight:
        last_input = max(nodes, key=lambda node: order[node.args[0]]).args[0]
        first_user = min(order[user] for node in nodes for user in node.users)
        if len(nodes) < 2 or order[last_input] > first_user:
            continue
        with module.graph.inserting_after(last_input):
            rows = module.graph.call_function(_aten.cat.default, ([node.args[0] for node in nodes],))
        weight = nodes[0].args[1]
        with module.graph.inserting_after(rows):
            held = module.graph.get_attr(weight.target)
        with module.graph.inserting_after(held):
            product = module.graph.call_function(_aten.mm.default, (rows, held))
        previous, start = product, 0
        for node in nodes:
            count = node.meta["val"].shape[0]
            with module.graph.inserting_after(previous):
                part = module.graph.call_function(_aten.slice.Tensor, (product, 0, start, start + count))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            previous, start = part, start + count
        product.meta["val"] = torch.empty(start, nodes[0].meta["val"].shape[1], device="meta")


def pack_weights(module: torch.fx.GraphModule) -> None:
    """Give products of few float32 rows a weight that oneDNN has laid out for them."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return
    left = PACKED_BYTES
    for number, node in enumerate(list(module.graph.nodes)):
        if node.target not in (_aten.mm.default, _aten.addmm.default) or "val" not in node.meta:
            continue
        bias, rows, held = (None, *node.args) if node.target is _aten.mm.default else node.args
        count = node.meta["val"].shape[0]
        weight = getattr(module, held.target) if held.op == "get_attr" else None
        if weight is None or weight.dtype is not torch.float32 or not weight.T.is_contiguous():
            continue
        size = weight.numel() * weight.element_size()
        if count not in PACKED_ROWS or size > left:
            continue
        left -= size
        name = f"packed_{number}"
        module.register_buffer(name, operations._reorder_linear_weight(weight.T, count), persistent=False)
        with module.graph.inserting_before(node):
            packed = module.graph.get_attr(name)
            product = module.graph.call_function(
                operations._linear_pointwise.default, (rows, packed, bias, "none", [], "")
            )
        product.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(product)


def take_biases(module: torch.fx.GraphModule) -> None:
    """A product and the bias added to it become one operation, rounded once."""
    for node in list(module.graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs:
            continue
        product, bias = node.args
        while product.target in _VIEWS_OF_ROWS and len(product.users) == 1:
            product = product.args[0]
        if product.target is not _aten.mm.default or len(product.users) != 1 or getattr(bias, "op", "") != "get_attr":
            continue
        value, like = getattr(module, bias.target), product.meta["val"]
        if value.shape != like.shape[1:] or value.dtype != like.dtype:
            continue
        with module.graph.inserting_before(product):
            held = module.graph.get_attr(bias.target)
            joined = module.graph.call_function(_aten.addmm.default, (held, *product.args))
        joined.meta["val"] = like
        product.replace_all_uses_with(joined)
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        module.graph.erase_node(product)


def place_searches(module: torch.fx.GraphModule) -> None:
    """Give searches for a few largest elements of long half-precision rows the kernel for it."""
    for node in list(module.graph.nodes):
        if node.target is not _aten.topk.default:
            continue
        rows, count, *rest = node.args
        value = rows.meta["val"]
        if rest not in ([], [-1]) or node.kwargs or value.dtype not in HALF_TYPES or value.device.type != "cuda":
            continue
        if gpu_operations.can_search(value.shape[-1], count):
            node.target, node.args = gpu_operations.find_largest, (rows, count)


def place_products(module: torch.fx.GraphModule) -> None:
    """Give products of few half-precision rows on a GPU the way that is fastest for their shape."""
    found: dict[tuple, list[tuple[torch.fx.Node, torch.Tensor]]] = {}
    for node in module.graph.nodes:
        if node.target not in (_aten.mm.default, _aten.addmm.default) or "val" not in node.meta:
            continue
        held = node.args[-1]
        weight = getattr(module, held.target) if held.op == "get_attr" else None
        count = node.meta["val"].shape[0]
        if weight is None or not gpu_operations.has_kernels(weight.device, weight.dtype):
            continue
        if count <= gpu_operations.MAX_ROWS and weight.T.is_contiguous():
            key = (count, tuple(weight.shape), node.target, not _is_cut(node))
            found.setdefault(key, []).append((node, weight))
    for (count, shape, target, is_taken_in), products in found.items():
        has_bias = target is _aten.addmm.default
        pairs = [] if has_bias else _find_pairs(products)
        pair_plan = None
        if pairs:
            pair_plan = gpu_operations.find_pair_plan(count, [(first[1], second[1]) for first, second in pairs])
        if pair_plan is not None:
            for (first, _), (second, _) in pairs:
                _replace_pair(module.graph, first, second, pair_plan)
            paired = {node for pair in pairs for node, _ in pair}
            products = [(node, weight) for node, weight in products if node not in paired]
        if not products:
            continue
        bias = products[0][1].new_zeros(shape[1]) if has_bias else None
        weights = [weight for _, weight in products]
        plan = gpu_operations.find_plan(count, weights, bias, is_taken_in=is_taken_in)
        if plan == gpu_operations.LIBRARY:
            continue
        for node, _ in products:
            given, rows, held = node.args if has_bias else (None, *node.args)
            with module.graph.inserting_before(node):
                product = module.graph.call_function(gpu_operations.multiply, (rows, held, given, plan))
                _replace_product(module.graph, node, product, plan.parts, given)


def _is_cut(node: torch.fx.Node) -> bool:
    """Whether pieces of a product are read by themselves: its parts are then added up before, by an operation alone."""
    return any(user.target in _CUTS or (user.target in _VIEWS_OF_ROWS and _is_cut(user)) for user in node.users)


def _find_pairs(
    products: list[tuple[torch.fx.Node, torch.Tensor]],
) -> list[tuple[tuple[torch.fx.Node, torch.Tensor], tuple[torch.fx.Node, torch.Tensor]]]:
    """Products of the same rows, two and two: the gate of an MLP and what it gates."""
    waiting: dict[torch.fx.Node, tuple[torch.fx.Node, torch.Tensor]] = {}
    pairs = []
    for node, weight in products:
        first = waiting.pop(node.args[0], None)
        if first is None:
            waiting[node.args[0]] = node, weight
        else:
            pairs.append((first, (node, weight)))
    return pairs


def take_plain_results(module: torch.fx.GraphModule) -> None:
    """Give results before a last widening to float32: it changes no value and no order, and is read once more."""
    output = next(node for node in module.graph.nodes if node.op == "output")

    def narrow(node: torch.fx.Node) -> torch.fx.Node:
        views = []
        while node.target in (_aten.view.default, _aten._unsafe_view.default) and len(node.users) == 1:
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


def _replace_pair(graph: torch.fx.Graph, first: torch.fx.Node, second: torch.fx.Node, plan: Any) -> None:
    """Two products of the same rows as one, of which each takes its half of every row."""
    count, width = first.meta["val"].shape
    with graph.inserting_before(first):
        second_weight = graph.get_attr(second.args[1].target)
        product = graph.call_function(gpu_operations.multiply, (*first.args, None, plan, second_weight))
        shape, dtype = (count, 2 * width), first.meta["val"].dtype
        if plan.parts > 1:
            shape, dtype = (plan.parts, *shape), torch.float32
        product.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        for node, start in ((first, 0), (second, width)):
            half = graph.call_function(_aten.slice.Tensor, (product, -1, start, start + width))
            _replace_product(graph, node, half, plan.parts, None)


def _replace_product(
    graph: torch.fx.Graph, node: torch.fx.Node, product: torch.fx.Node, parts: int, bias: torch.fx.Node | None
) -> None:
    """Put a product in a node's place; a fused run adds up the parts of its sum, and the bias, as it reads them."""
    like = node.meta["val"]
    if parts > 1:
        product.meta["val"] = torch.empty((parts, *like.shape), dtype=torch.float32, device="meta")
        product = graph.call_function(_aten.sum.dim_IntList, (product, [0]))
        product.meta["val"] = torch.empty(like.shape, dtype=torch.float32, device="meta")
        if bias is not None:
            product = graph.call_function(_aten.add.Tensor, (product, bias))
            product.meta["val"] = torch.empty(like.shape, dtype=torch.float32, device="meta")
        product = graph.call_function(_aten._to_copy.default, (product,), {"dtype": like.dtype})
    product.meta["val"] = like
    node.replace_all_uses_with(product)


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
