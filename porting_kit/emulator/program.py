"""A decode step of one shape as a flat list of tensor operations: the model's Python runs once, to write it down.

Upstream's Python defines a network, so one run of it under torch.fx gives all that a step does. The list takes token
ids, pasts and the cache's tensors, so that it serves every request whose past ends within `end` rows; what depends on
nothing of these is computed once. The heads are a list of their own, because a step needs them at one node and not at
all of them. On a CPU, products of a few rows use weights that oneDNN has laid out before, while they fit a budget: its
kernels, and MKL's, spend more time on that layout than on two to sixteen rows of products.

Nothing is checked here: an eager step has to have run before, and the caller compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.replay import RecordedStep
from porting_kit.emulator.tensor_type import Tensor

if TYPE_CHECKING:
    from porting_kit.emulator.model import EmulatedModel

PACKED_ROWS = range(2, 33)
"""Rows of a product for which a laid-out weight is faster (measured on AVX2: 1.0 to 1.7 times)."""

PACKED_BYTES = 2 << 30
"""Laid-out copies of weights a program may hold."""

_aten = torch.ops.aten


class StepProgram:
    """One decode step of B requests with N nodes each.

    Args:
        model: the model.
        cache: a cache of B requests with all layers allocated; only its shape counts.
        nodes: N.
        end: cache rows that every request attends to behind its mask.
        position_offsets: int32 [N]; None without a tree.
        packed_mask: int32 [N, W]; None without a tree.
        compiles: hand the operations to torch.compile.

    Raises:
        RuntimeError: the step reads a value back, so that it cannot be written down.
    """

    def __init__(
        self,
        model: EmulatedModel,
        cache: KVCache,
        nodes: int,
        end: int,
        position_offsets: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
        *,
        compiles: bool = False,
    ) -> None:
        B, device = cache.batch_size, model.device
        offsets = None if position_offsets is None else position_offsets.to(device)
        words = None if packed_mask is None else packed_mask.to(device)
        prompts = cache.context_lengths.tolist()

        def run(ids: torch.Tensor, pasts: torch.Tensor, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            stand_in = KVCache(B, cache.capacity, device=device, attention_window=cache.attention_window)
            stand_in.hold(dict(zip(cache.layer_indices, layers, strict=True)))
            stand_in.context_lengths = prompts  # plain numbers: reading a tensor back cannot be written down
            step = RecordedStep(
                cache=stand_in,
                generation_lengths=[nodes] * B,
                generation_slots=list(range(B)),
                pasts=[0] * B,
                kernel=model.kernel,
                is_speculative=words is not None,
                past_buffer=pasts,
                end=end,
            )
            positions = (pasts if offsets is None else pasts + offsets).flatten()
            spec = model.inputs.build_tree(offsets, words, [nodes] * B, device)
            rows = torch.arange(1, B * nodes + 1, device=device)
            output = model.run_step(step, ids.flatten(), positions, rows, spec)
            return output.logits.view(B, nodes, -1), output.hidden_states.view(B, nodes, -1)

        ids = torch.zeros(B, nodes, dtype=torch.int64, device=device)
        pasts = torch.zeros(B, 1, dtype=torch.int64, device=device)
        # Writing down executes the step, so it must not see the cache's own tensors.
        self._call = write_program(run, (ids, pasts, *map(torch.zeros_like, cache.layers)), compiles=compiles)

    def __call__(
        self, ids: torch.Tensor, pasts: torch.Tensor, layers: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [B, N], pasts int64 [B, 1], cache tensors -> logits [B, N, Vp], hidden states [B, N, E]."""
        return self._call(ids, pasts, *layers)


class HeadProgram:
    """The Medusa heads alone: hidden states [B, E] to logits [M, B, Vp]."""

    def __init__(self, model: EmulatedModel, batch_size: int, *, compiles: bool = False) -> None:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            with model.running():
                heads = [head(Tensor(hidden)).data for head in model.module.medusa_heads]
            return torch.stack(heads).to(model.logits_dtype)

        hidden = torch.zeros(batch_size, int(model.config["hidden_size"]), dtype=model.dtype, device=model.device)
        self._call = write_program(run, (hidden,), compiles=compiles)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, E] -> [M, B, Vp]."""
        return self._call(hidden)


def write_program(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], *, compiles: bool = False
) -> Callable[..., Any]:
    """Run a function once and return the same operations as one flat function of the inputs.

    Everything else that the function reads is held by the program as it is: a weight that is changed in place counts.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        module = make_fx(function, pre_dispatch=False)(*inputs)
    fold_constants(module)
    share_products(module)
    if inputs[0].device.type == "cpu":
        pack_weights(module)
    remove_dead(module)
    module.graph.lint()
    module.recompile()
    return torch.compile(module, fullgraph=True, dynamic=False) if compiles else module


def is_in_place(node: torch.fx.Node) -> bool:
    """Whether an operation changes what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


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


def share_products(module: torch.fx.GraphModule) -> None:
    """Products of one weight with several single inputs become one product: heads that share the base's matrix."""
    by_weight: dict[Any, list[torch.fx.Node]] = {}
    for node in module.graph.nodes:
        if node.target is _aten.mm.default and node.args[1].op == "get_attr":
            weight = getattr(module, node.args[1].target)
            key = (weight.data_ptr(), tuple(weight.shape), tuple(weight.stride()))
            by_weight.setdefault(key, []).append(node)
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for nodes in by_weight.values():
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
