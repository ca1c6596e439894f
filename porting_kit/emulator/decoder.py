"""A cache and the step programs over it: what a decode loop needs to run whole steps without a model's Python.

Decoders are kept by the model and used again, because writing a program down takes as long as dozens of steps. A
program is compared with an eager step before it is used; a model that cannot be written down, or whose program
differs, is decoded eagerly.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from porting_kit.emulator import gpu_operations
from porting_kit.emulator.cache import KVCache
from porting_kit.emulator.gpu_products import MAX_ROWS
from porting_kit.emulator.program import HeadProgram, StepProgram, write_program
from porting_kit.emulator.program_passes import is_same
from porting_kit.emulator.replay import BUCKET_TOKENS

if TYPE_CHECKING:
    from porting_kit.emulator.model import EmulatedModel

KEPT_DECODERS = 2
"""Decoders a model keeps; each holds a cache, and on a CPU laid-out weights."""


class Foresight(NamedTuple):
    """Nodes at which a step gives the heads' logits itself, where that pays.

    Args:
        nodes: at most.
        rows: of the product with the output matrix, at most; more are a matter of arithmetic.
        matrix_bytes: of the output matrix, at least; reading a small one again costs little.
    """

    nodes: int
    rows: int
    matrix_bytes: int


FORESIGHT = {"cuda": Foresight(8, MAX_ROWS, 256 << 20), "cpu": Foresight(2, 16, 64 << 20)}
"""By kind of device; on a CPU a row more costs a fifteenth of a second reading, whether or not it is needed."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_LOG = logging.getLogger(__name__)


class Decoder:
    """Decode steps of one shape.

    Args:
        model: the model.
        batch_size: B.
        capacity_tokens: tokens a request may hold; rounded up, so that requests of like length share a decoder.
        position_offsets: int32 [N] of the tree; None without one (N = 1).
        packed_mask: int32 [N, W]; None without a tree.

    Attributes:
        cache: to be filled by `model.prefill`.
        memo: for the caller: what it wants to find again with the decoder.
        num_heads: M, heads that the tree reads: one a level.
        foreseen: nodes at which a step gives the heads' logits itself; see `foresee`.
    """

    def __init__(
        self,
        model: EmulatedModel,
        batch_size: int,
        capacity_tokens: int,
        position_offsets: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
    ) -> None:
        self._model, self._offsets, self._words = model, position_offsets, packed_mask
        self._compiles = model.decoders.compiles
        self.nodes = 1 if position_offsets is None else len(position_offsets)
        depth = 0 if position_offsets is None else int(position_offsets.max())
        self.num_heads = min(depth, model.num_medusa_heads)
        self.cache: KVCache = model.new_cache(batch_size, capacity_tokens)
        self.memo: dict[str, Any] = {}
        self.foreseen: tuple[int, ...] = ()
        self._programs: dict[int, StepProgram] = {}
        self._heads: HeadProgram | None = None
        self._is_checked = False

    def end_for(self, past_tokens: int) -> int:
        """The cache rows that a step attends to when the longest request has `past_tokens`."""
        return min(self.cache.capacity, -(-(past_tokens + self.nodes) // BUCKET_TOKENS) * BUCKET_TOKENS)

    def foresee(self, nodes: Sequence[int]) -> None:
        """Let steps give the heads' logits at the likeliest last accepted nodes, where that pays; before any step.

        Heads run at the node that was accepted last, which is known after the step only. Where they share a large
        output matrix with the base, they read it once more then; at a few nodes they can run beside the base's product.

        Args:
            nodes: the likeliest first.
        """
        B, M, device = self.cache.batch_size, self.num_heads, self._model.device
        is_served = device.type == "cpu" or (self._compiles and gpu_operations.has_kernels(device, self._model.dtype))
        foresight = FORESIGHT.get(device.type)
        if foresight is None or self._programs or not is_served:
            return
        fitting = min(foresight.nodes, (foresight.rows - B * self.nodes) // (B * max(M, 1)))
        if M and fitting > 0 and measure_shared_matrix(self._model) >= foresight.matrix_bytes:
            self.foreseen = tuple(nodes[:fitting])

    def check(self, ids: torch.Tensor) -> None:
        """Compare the program with an eager step on these ids [B, N]; nothing is kept of either.

        Raises:
            RuntimeError: they differ, or the step cannot be written down.
        """
        if self._is_checked:
            return
        self.cache.join()
        cache, model = self.cache, self._model
        expected = model.decode(ids.cpu(), cache, position_offsets=self._offsets, packed_mask=self._words)
        cache.rewind(cache.lengths)
        pasts = cache.lengths.to(model.device).unsqueeze(1)
        logits, hidden, guesses = self.step(ids, pasts, self.end_for(int(cache.lengths.max())))
        found = [(logits, expected.logits)]
        if self.num_heads:
            found.append((self.heads(hidden[:, -1]), expected.medusa_logits[: self.num_heads, :, -1]))
        if guesses is not None:
            found.append((guesses, expected.medusa_logits[: self.num_heads, :, list(self.foreseen)]))
        for ours, eager in found:
            scale = float(eager.abs().max()) + 1e-6
            if not float((ours - eager).abs().max()) <= _TOLERANCES[model.dtype] * scale:
                raise RuntimeError(f"the program differs from the eager step: {float((ours - eager).abs().max())}")
        self._is_checked = True

    def step(
        self, ids: torch.Tensor, pasts: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """One step of all requests.

        Args:
            ids: int64 [B, N].
            pasts: int64 [B, 1], on the model's device.
            end: cache rows to attend to, of `end_for`.

        Returns:
            logits [B, N, Vp], hidden states [B, N, E], and the heads' logits [M, B, F, Vp] at the F foreseen nodes, or
            None.
        """
        if end not in self._programs:
            self._programs[end] = StepProgram(
                self._model,
                self.cache,
                self.nodes,
                end,
                self._offsets,
                self._words,
                head_nodes=self.foreseen,
                num_heads=self.num_heads,
                compiles=self._compiles,
            )
        logits, hidden, *guesses = self._programs[end](ids, pasts, self.cache.layers)
        return logits, hidden, guesses[0] if guesses else None

    def heads(self, hidden: torch.Tensor, is_known: torch.Tensor | None = None) -> torch.Tensor:
        """Logits at one node a request of the heads that the tree reads: [B, E] to [M, B, Vp].

        Args:
            hidden: the states.
            is_known: int32 [1]; where it is not 0 the logits may hold anything. It counts where nodes are foreseen.
        """
        has_skip = bool(self.foreseen)
        if has_skip and hidden.device.type == "cpu" and is_known is not None and bool(is_known):
            vocab_size = self._model.vocab_size_padded
            return hidden.new_zeros(()).expand(self.num_heads, len(hidden), vocab_size)
        if self._heads is None:
            self._heads = HeadProgram(
                self._model, self.cache.batch_size, self.num_heads, has_skip=has_skip, compiles=self._compiles
            )
        if not has_skip:
            return self._heads(hidden)
        if is_known is None:
            is_known = torch.zeros(1, dtype=torch.int32, device=hidden.device)
        return self._heads(hidden, is_known)

    def keep(self, rows: torch.Tensor, pasts: torch.Tensor) -> None:
        """Move the accepted rows of the last step together: past + rows[b, i] to past + i; -1 moves nothing.

        Args:
            rows: int64 [B, A], on the model's device.
            pasts: int64 [B, 1].
        """
        if (
            self._compiles
            and self.cache.joined is not None
            and gpu_operations.has_kernels(rows.device, self._model.dtype)
        ):
            gpu_operations.move_rows(self.cache.joined, rows, pasts)
            return
        slots = torch.arange(rows.shape[1], device=rows.device)
        source = pasts + torch.where(rows < 0, slots, rows)
        requests = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        if self.cache.joined is not None:
            joined = self.cache.joined
            joined[:, requests, :, :, pasts + slots] = joined[:, requests, :, :, source]
            return
        for layer in self.cache.layers:
            layer[requests, :, :, pasts + slots] = layer[requests, :, :, source]

    def write_down(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A function of tensors with its small operations fused, where this decoder compiles; else as it is."""
        if not self._compiles or self._model.device.type != "cuda":
            return function
        return write_program(function, inputs, compiles=True)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function of tensors that stay where they are, as a CUDA graph; on a CPU the function itself."""
        if self._model.device.type != "cuda":
            return function
        stream = torch.cuda.Stream(self._model.device)
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self._model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay


class Decoders:
    """The decoders that a model keeps.

    Attributes:
        is_enabled: False runs every step eagerly; may be changed at any time.
        compiles: new decoders use kernels of few rows and fused runs on a GPU; compiling takes half a minute at first.
        keep: how many decoders are kept, those used last.
    """

    def __init__(self) -> None:
        self.is_enabled, self.compiles, self.keep = True, False, KEPT_DECODERS
        self._kept: OrderedDict[tuple, Decoder] = OrderedDict()
        self._failed: set[tuple] = set()
        self._versions: tuple[int, ...] = ()

    def open(
        self,
        model: EmulatedModel,
        batch_size: int,
        capacity_tokens: int,
        position_offsets: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
    ) -> Decoder | None:
        """The decoder of a shape, kept or new; None when steps of the model have to run eagerly."""
        if not self.is_enabled or not can_write_down(model):
            return None
        versions = weight_versions(model)
        if versions != self._versions:
            # A weight was changed in place: what was computed from it once is stale.
            self._versions = versions
            self._kept.clear()
        capacity = -(-capacity_tokens // BUCKET_TOKENS) * BUCKET_TOKENS
        tree = (
            None if packed_mask is None else (tuple(position_offsets.tolist()), tuple(packed_mask.flatten().tolist()))
        )
        key = (batch_size, capacity, tree)
        if key in self._failed:
            return None
        if key not in self._kept:
            self._kept[key] = Decoder(model, batch_size, capacity, position_offsets, packed_mask)
            while len(self._kept) > self.keep:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def give_up(self, decoder: Decoder, reason: Exception) -> None:
        """Forget a decoder whose program cannot be used; its shape runs eagerly from now on."""
        _LOG.info("decode steps cannot be written down and run eagerly: %s", reason)
        for key in [key for key, kept in self._kept.items() if kept is decoder]:
            del self._kept[key]
            self._failed.add(key)


def can_write_down(model: EmulatedModel) -> bool:
    """One rank, no module recorded, no kernel profile; on a CPU no half type (its weights would be kept twice)."""
    is_plain = model.device.type == "cuda" or model.dtype in (torch.float32, torch.float64)
    return is_plain and model.mapping.world_size == 1 and model.kernel is None and not model.replays.is_suspended


def measure_shared_matrix(model: EmulatedModel) -> int:
    """Bytes of the output matrix that the heads share with the base; 0 where they have others."""
    matrices = [value for name, value in model.named_parameters().items() if name.endswith("lm_head.weight")]
    first, *others = matrices or [torch.empty(0)]
    is_shared = len(others) > 0 and all(is_same(first, other) for other in others)
    return first.numel() * first.element_size() if is_shared else 0


def weight_versions(model: EmulatedModel) -> tuple[int, ...]:
    """How often each weight was changed in place."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in model.named_parameters().values())
