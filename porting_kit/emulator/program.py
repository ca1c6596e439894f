"""A decode step of one shape as a flat list of tensor operations: the model's Python runs once, to write it down.

Upstream's Python defines a network, so one run of it under torch.fx gives all that a step does. The list takes token
ids, pasts and the cache's tensors, so that it serves every request whose past ends within `end` rows; what depends on
nothing of these is computed once. The heads are a list of their own, because a step needs them at one node and not at
all of them; a step can give them at a few nodes besides, in the same reading of the output matrix. On a CPU, products
of a few rows use weights that oneDNN has laid out before, while they fit a budget: its kernels, and MKL's, spend more
time on that layout than on two to sixteen rows of products. A compiled program on a GPU takes products, attention and
the cache's rows through kernels of its own, and everything between them in fused runs.

Nothing is checked here: an eager step has to have run before, and the caller compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from porting_kit.emulator import gpu_operations, product_passes, program_passes
from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.fused_chains import fuse_chains
from porting_kit.emulator.replay import RecordedStep
from porting_kit.emulator.tensor_type import Tensor

if TYPE_CHECKING:
    from porting_kit.emulator.model import EmulatedModel


class StepProgram:
    """One decode step of B requests with N nodes each.

    Args:
        model: the model.
        cache: a cache of B requests with all layers allocated; only its shape counts.
        nodes: N.
        end: cache rows that every request attends to behind its mask.
        position_offsets: int32 [N]; None without a tree.
        packed_mask: int32 [N, W]; None without a tree.
        head_nodes: nodes at which the step gives the heads' logits too.
        num_heads: M, how many heads, from the first one.
        compiles: use kernels of few rows and fused runs.

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
        head_nodes: Sequence[int] = (),
        num_heads: int = 0,
        compiles: bool = False,
    ) -> None:
        B, device = cache.batch_size, model.device
        offsets = None if position_offsets is None else position_offsets.to(device)
        words = None if packed_mask is None else packed_mask.to(device)
        prompts = cache.context_lengths.tolist()

        def run(ids: torch.Tensor, pasts: torch.Tensor, *layers: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
                kernels=gpu_operations if compiles and gpu_operations.has_kernels(device, model.dtype) else None,
            )
            positions = (pasts if offsets is None else pasts + offsets).flatten()
            spec = model.inputs.build_tree(offsets, words, [nodes] * B, device)
            rows = torch.arange(1, B * nodes + 1, device=device)
            output = model.run_step(step, ids.flatten(), positions, rows, spec)
            hidden = output.hidden_states.view(B, nodes, -1)
            results = (output.logits.view(B, nodes, -1), hidden)
            if not head_nodes:
                return results
            guesses = run_heads(model, hidden[:, list(head_nodes)].flatten(0, 1), num_heads)
            return *results, guesses.view(len(guesses), B, len(head_nodes), -1)

        ids = torch.zeros(B, nodes, dtype=torch.int64, device=device)
        pasts = torch.zeros(B, 1, dtype=torch.int64, device=device)
        # Writing down executes the step, so it must not see the cache's own tensors.
        self._call = write_program(run, (ids, pasts, *map(torch.zeros_like, cache.layers)), compiles=compiles)

    def __call__(
        self, ids: torch.Tensor, pasts: torch.Tensor, layers: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """ids int64 [B, N], pasts int64 [B, 1], cache tensors -> logits [B, N, Vp], hidden states [B, N, E].

        With H head nodes also the heads' logits there, [M, B, H, Vp].
        """
        return self._call(ids, pasts, *layers)


class HeadProgram:
    """The Medusa heads alone: hidden states [B, E] to logits [M, B, Vp].

    Args:
        model: the model.
        batch_size: B.
        num_heads: M, how many heads, from the first one.
        has_skip: on a GPU, calls say whether the result is needed.
        compiles: as of a step.
    """

    def __init__(
        self, model: EmulatedModel, batch_size: int, num_heads: int, *, has_skip: bool = False, compiles: bool = False
    ) -> None:
        hidden = torch.zeros(batch_size, int(model.config["hidden_size"]), dtype=model.dtype, device=model.device)
        skip = [torch.zeros(1, dtype=torch.int32, device=model.device)] if has_skip else []
        self._call = write_program(
            lambda hidden, *_: run_heads(model, hidden, num_heads),
            (hidden, *skip),
            compiles=compiles,
            has_skip=has_skip,
        )

    def __call__(self, hidden: torch.Tensor, *skip: torch.Tensor) -> torch.Tensor:
        """hidden [B, E] -> [M, B, Vp]; skip: int32 [1], where it is not 0 the result holds anything."""
        return self._call(hidden, *skip)


def run_heads(model: EmulatedModel, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The first heads on hidden states [T, E] -> [M, T, Vp], by the model's own code."""
    with model.running():
        heads = [head(Tensor(hidden)).data for head in list(model.module.medusa_heads)[:num_heads]]
    return torch.stack(heads).to(model.logits_dtype)


def write_program(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], *, compiles: bool = False, has_skip: bool = False
) -> Callable[..., Any]:
    """Run a function once and return the same operations as one flat function of the inputs.

    Everything else that the function reads is held by the program as it is: a weight that is changed in place counts.

    Args:
        function: of tensors.
        inputs: of the shapes and on the device that the program is for.
        compiles: use kernels of few rows and fused runs.
        has_skip: the last input says, where it is not 0, that no product is needed; a compiled program heeds it.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        module = make_fx(lambda *given: function(*given), pre_dispatch=False)(*inputs)
    program_passes.fold_constants(module)
    program_passes.remove_dead(module)  # the heads at every node, which nothing reads, must not join the base's product
    program_passes.share_results(module)
    product_passes.share_products(module)
    product_passes.join_slices(module)
    if inputs[0].device.type == "cpu":
        product_passes.pack_weights(module)
    elif compiles:
        product_passes.take_biases(module)
        product_passes.join_weights(module)
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        product_passes.place_products(module, skip=given[-1] if has_skip else None)
        program_passes.place_searches(module)
    program_passes.take_plain_results(module)
    program_passes.remove_dead(module)
    module.graph.lint()
    module.recompile()
    return fuse_chains(module) if compiles else module
