"""Passes over the products of a written program: shared, laid out, joined with their bias, given their kernel.

What a program is, `program_passes` says. A pass changes at most the order of a sum and where it is rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from porting_kit.emulator import gpu_operations, gpu_products
from porting_kit.emulator.fused_chains import find_changed, find_owner, is_in_place
from porting_kit.emulator.program_passes import VIEWS_OF_ROWS, is_same

PACKED_ROWS = range(2, 33)
"""Rows of a product for which a laid-out weight is faster (measured on AVX2: 1.0 to 1.7 times)."""

PACKED_BYTES = 2 << 30
"""Laid-out copies of weights a program may hold."""

JOINED_BYTES = 256 << 20
"""Weights that a program copies into joined ones: several heads' first layers."""

_aten = torch.ops.aten
_CUTS = (_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default)


def share_products(module: torch.fx.GraphModule) -> None:
    """Products of one weight with several single inputs become one product: heads that share the base's matrix.

    A checkpoint holds the shared matrix once a head, so weights are compared by value.
    """
    by_weight: list[tuple[torch.Tensor, list[torch.fx.Node]]] = []
    for node in module.graph.nodes:
        if node.target is _aten.mm.default and node.args[1].op == "get_attr":
            weight = getattr(module, node.args[1].target)
            nodes = next((nodes for other, nodes in by_weight if is_same(weight, other)), None)
            if nodes is None:
                by_weight.append((weight, nodes := []))
            nodes.append(node)
    for _, nodes in by_weight:
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        last_input = max(nodes, key=lambda node: order[node.args[0]]).args[0]
        if len(nodes) < 2 or not _put_off(module.graph, nodes, last_input):
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


def _put_off(graph: torch.fx.Graph, products: list[torch.fx.Node], last: torch.fx.Node) -> bool:
    """Move what reads the products behind a later node; False where that cannot be, and nothing has moved."""
    changed = find_changed(graph)
    waiting, moved = set(products), []
    for node in graph.nodes:
        if waiting & set(node.all_input_nodes):
            if node is last or is_in_place(node) or changed & {find_owner(used) for used in node.all_input_nodes}:
                return False
            waiting.add(node)
            moved.append(node)
        if node is last:
            break
    for node in reversed(moved):
        last.append(node)
    return True


def join_slices(module: torch.fx.GraphModule) -> None:
    """A stack of neighbouring pieces of one product's rows, as many in each, is a view of them."""
    for node in list(module.graph.nodes):
        if node.target is not _aten.stack.default or len(node.args) > 1:
            continue
        pieces = node.args[0]
        if any(piece.target is not _aten.slice.Tensor or piece.args[1] != 0 for piece in pieces):
            continue
        starts = [piece.args[2] for piece in pieces]
        count = pieces[0].args[3] - starts[0]
        spans = [(start, start + count) for start in range(starts[0], starts[0] + count * len(pieces), count)]
        if len({piece.args[0] for piece in pieces}) > 1 or [piece.args[2:4] for piece in pieces] != spans:
            continue
        with module.graph.inserting_before(node):
            rows = module.graph.call_function(_aten.slice.Tensor, (pieces[0].args[0], 0, starts[0], spans[-1][1]))
        rows.meta["val"] = node.meta["val"].flatten(0, 1)
        node.target, node.args = _aten.view.default, (rows, list(node.meta["val"].shape))


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
        while product.target in VIEWS_OF_ROWS and len(product.users) == 1:
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


def join_weights(module: torch.fx.GraphModule) -> None:
    """Three and more products of the same rows become one with a joined weight; `place_products` sees to two."""
    groups: dict[tuple, list[torch.fx.Node]] = {}
    for node in module.graph.nodes:
        if node.target in (_aten.mm.default, _aten.addmm.default) and node.args[-1].op == "get_attr":
            weight, count = getattr(module, node.args[-1].target), len(node.args)
            is_plain = count == 2 or (node.args[0].op == "get_attr" and getattr(module, node.args[0].target).dim() == 1)
            if is_plain and weight.T.is_contiguous():
                groups.setdefault((node.target, node.args[-2], weight.dtype), []).append(node)
    left = JOINED_BYTES
    for number, ((target, rows, dtype), nodes) in enumerate(groups.items()):
        # The bias, where there is one, and the weight of each.
        held = [[getattr(module, given.target) for given in (*node.args[:-2], node.args[-1])] for node in nodes]
        size = sum(weight.numel() * weight.element_size() for *_, weight in held)
        if len(nodes) < 3 or size > left:
            continue
        left -= size
        joined = [torch.cat(given) for given in list(zip(*held, strict=True))[:-1]]
        joined.append(torch.cat([weight.T for *_, weight in held]).T)
        # A placeholder may come before those that the product's kernel reads besides.
        last_given = next(node for node in reversed(module.graph.nodes) if node.op == "placeholder")
        given = []
        with module.graph.inserting_after(last_given if rows.op == "placeholder" else rows):
            for index, value in enumerate(joined):
                module.register_buffer(f"joined_{number}_{index}", value, persistent=False)
                given.append(module.graph.get_attr(f"joined_{number}_{index}"))
        with module.graph.inserting_after(given[0]):
            product = module.graph.call_function(target, (*given[:-1], rows, given[-1]))
        like = torch.empty(len(nodes[0].meta["val"]), joined[-1].shape[1], dtype=dtype, device="meta")
        product.meta["val"], start, previous = like, 0, product
        for node in nodes:
            end = start + node.meta["val"].shape[1]
            with module.graph.inserting_after(previous):
                previous = module.graph.call_function(_aten.slice.Tensor, (product, 1, start, end))
            previous.meta["val"], start = like[:, start:end], end
            node.replace_all_uses_with(previous)
            module.graph.erase_node(node)


def place_products(module: torch.fx.GraphModule, skip: torch.fx.Node | None = None) -> None:
    """Give products of few half-precision rows on a GPU the way that is fastest for their shape.

    Args:
        module: the program.
        skip: the input whose value, where it is not 0, says that no product is needed.
    """
    found: dict[tuple, list[tuple[torch.fx.Node, torch.Tensor]]] = {}
    for node in module.graph.nodes:
        if node.target not in (_aten.mm.default, _aten.addmm.default) or "val" not in node.meta:
            continue
        held = node.args[-1]
        weight = getattr(module, held.target) if held.op == "get_attr" else None
        count = node.meta["val"].shape[0]
        if weight is None or not gpu_operations.has_kernels(weight.device, weight.dtype):
            continue
        if count <= gpu_products.MAX_ROWS and weight.T.is_contiguous():
            key = (count, tuple(weight.shape), node.target, not _is_cut(node))
            found.setdefault(key, []).append((node, weight))
    for (count, shape, target, is_taken_in), products in found.items():
        has_bias = target is _aten.addmm.default
        pairs = [] if has_bias else _find_pairs(products)
        pair_plan = None
        if pairs:
            pair_plan = gpu_products.find_pair_plan(count, [(first[1], second[1]) for first, second in pairs])
        if pair_plan is not None:
            for (first, _), (second, _) in pairs:
                _replace_pair(module.graph, first, second, pair_plan, skip)
            paired = {node for pair in pairs for node, _ in pair}
            products = [(node, weight) for node, weight in products if node not in paired]
        if not products:
            continue
        bias = products[0][1].new_zeros(shape[1]) if has_bias else None
        weights = [weight for _, weight in products]
        plan = gpu_products.find_plan(count, weights, bias, is_taken_in=is_taken_in, has_library=skip is None)
        if plan == gpu_products.LIBRARY:
            continue
        for node, _ in products:
            given, rows, held = node.args if has_bias else (None, *node.args)
            with module.graph.inserting_before(node):
                product = module.graph.call_function(gpu_products.multiply, (rows, held, given, plan, None, skip))
                _replace_product(module.graph, node, product, plan.parts, given)


def _is_cut(node: torch.fx.Node) -> bool:
    """Whether pieces of a product are read by themselves: its parts are then added up before, by an operation alone."""
    return any(user.target in _CUTS or (user.target in VIEWS_OF_ROWS and _is_cut(user)) for user in node.users)


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


def _replace_pair(
    graph: torch.fx.Graph, first: torch.fx.Node, second: torch.fx.Node, plan: Any, skip: torch.fx.Node | None
) -> None:
    """Two products of the same rows as one, of which each takes its half of every row."""
    count, width = first.meta["val"].shape
    with graph.inserting_before(first):
        second_weight = graph.get_attr(second.args[1].target)
        product = graph.call_function(gpu_products.multiply, (*first.args, None, plan, second_weight, skip))
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
