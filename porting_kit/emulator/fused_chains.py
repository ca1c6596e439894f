"""Runs of small operations in a written program, each compiled as one: what a layer writes as dozens of operations.

A program is a list in order, so that the operations between two products, attentions or in-place changes can be handed
to torch.compile together. Layers are alike: a run is compiled once and called by every layer with its own weights, so
that a model of thirty layers takes seconds and not minutes.
"""

from __future__ import annotations

import operator

import torch

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.alias.default,
    _aten.detach.default,
}
_OTHERS = {
    _aten.cat.default,
    _aten.stack.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.mean.dim,
    _aten.sum.dim_IntList,
    _aten.sum.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.max.dim,
    _aten.all.dim,
    _aten.any.dim,
    _aten.var_mean.correction,
    _aten.native_layer_norm.default,
    _aten._softmax.default,
    _aten.argmax.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.embedding.default,
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.full.default,
}
FEWEST = 2
"""Operations, views aside, from which on a run is worth compiling."""

_compiled: dict[str, torch.nn.Module] = {}
"""Runs by what they do and to which shapes; they hold no weights, so that programs and models share them."""


def fuse_chains(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same program with its runs of small operations compiled.

    Args:
        module: a flat program whose nodes carry what they give in meta["val"].
    """
    graph = module.graph
    first = next(iter(graph.nodes))
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        first.prepend(node)
    _hoist(graph)
    for number, run in enumerate(_find_runs(graph)):
        _replace_run(module, run, f"chain_{number}")
    graph.lint()
    module.recompile()
    return module


def _hoist(graph: torch.fx.Graph) -> None:
    """Move products and the like to where their inputs are there, so that what is between them is one run."""
    changed = find_changed(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or is_small(node) or is_in_place(node):
            continue
        inputs = set(node.all_input_nodes)
        if changed & {find_owner(used) for used in inputs}:
            continue  # what it reads depends on when it reads it
        last = node.prev
        while last not in inputs and last.op == "call_function":
            last = last.prev
        if last.op == "call_function" and last is not node.prev:
            last.append(node)


def find_changed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes whose memory some operation changes in place."""
    changed = set()
    for node in filter(is_in_place, graph.nodes):
        for given, argument in zip(node.args, node.target._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed |= {find_owner(used) for used in node.all_input_nodes if used is given}
    return changed


def find_owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory a view shows."""
    while node.target in _VIEWS or node.target is operator.getitem:
        node = node.args[0]
    return node


def is_in_place(node: torch.fx.Node) -> bool:
    """Whether an operation changes what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_small(node: torch.fx.Node) -> bool:
    """Whether an operation may join a run: elementwise, a view, a reduction, a look-up; nothing in place."""
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:
        return is_small(node.args[0])
    if getattr(target, "_schema", None) is None or is_in_place(node):
        return False
    return target in _VIEWS or target in _OTHERS or torch.Tag.pointwise in target.tags


def _find_runs(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Neighbours in the list that may join, where enough of them compute something."""
    runs: list[list[torch.fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        if is_small(node):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if sum(_computes(node) for node in run) >= FEWEST]


def _computes(node: torch.fx.Node) -> bool:
    return node.target not in _VIEWS and node.target is not operator.getitem


def _replace_run(module: torch.fx.GraphModule, run: list[torch.fx.Node], name: str) -> None:
    inside = set(run)
    inputs = list(dict.fromkeys(used for node in run for used in node.all_input_nodes if used not in inside))
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    part = torch.fx.Graph()
    copies = {node: part.placeholder(f"given_{index}") for index, node in enumerate(inputs)}
    for index, node in enumerate(run):
        copies[node] = part.node_copy(node, copies.__getitem__)
        copies[node].name = f"value_{index}"
    part.output(tuple(copies[node] for node in outputs))
    key = part.python_code("self").src + repr([describe(module, node) for node in inputs])
    if key not in _compiled:
        _compiled[key] = torch.compile(torch.fx.GraphModule(module, part), fullgraph=True, dynamic=False)
    module.add_submodule(name, _compiled[key])
    with module.graph.inserting_after(run[-1]):
        call = module.graph.call_module(name, tuple(inputs))
    previous = call
    for index, node in enumerate(outputs):
        with module.graph.inserting_after(previous):
            previous = module.graph.call_function(operator.getitem, (call, index))
        previous.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(previous)
    for node in reversed(run):
        module.graph.erase_node(node)


def describe(module: torch.fx.GraphModule, node: torch.fx.Node) -> tuple:
    """Shape, strides and type of what a node gives: two runs that differ in them are compiled apart."""
    value = getattr(module, node.target) if node.op == "get_attr" else node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    return tuple(value.shape), value.stride(), value.dtype
