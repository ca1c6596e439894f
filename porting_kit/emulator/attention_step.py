"""What one call of a model means for every attention layer: which rows are prompts, which are drafts, and their masks.

Tokens are packed as TensorRT-LLM packs them: context requests first, then generation requests. Lengths are plain
integers here, so that no layer reads a tensor back; masks and rotary rows are made once a step and shared by layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from porting_kit.emulator.cache import KVCache, store_rows


@dataclass
class AttentionStep:
    """One call of a model.

    Args:
        cache: the KV cache that the call reads and writes.
        context_lengths: tokens of each context request.
        context_slots: cache row of each context request.
        generation_lengths: tokens of each generation request (N for a tree, 1 without one).
        generation_slots: cache row of each generation request.
        pasts: tokens that each generation request already has.
        kernel: kernel profile; None is exact arithmetic.
        is_speculative: whether the generation requests carry a tree.
    """

    cache: KVCache
    context_lengths: Sequence[int] = ()
    context_slots: Sequence[int] = ()
    generation_lengths: Sequence[int] = ()
    generation_slots: Sequence[int] = ()
    pasts: Sequence[int] = ()
    kernel: Any = None
    is_speculative: bool = False
    memo: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    layers_counted: int = 0
    # Whether the step is being recorded for other pasts: nothing may be read back or depend on these ones.
    is_recorded: bool = False
    # Module `gpu_operations`, when its kernels write and read the cache; only a step that is written down has it.
    kernels: Any = None

    @property
    def context_tokens(self) -> int:
        return sum(self.context_lengths)

    @property
    def generation_tokens(self) -> int:
        return sum(self.generation_lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request after the step."""
        return max([*self.context_lengths, *self.generation_ends])

    @property
    def generation_end(self) -> int:
        """Cache rows that generation attends to: those of the longest request."""
        return max(self.pasts) + max(self.generation_lengths)

    @property
    def generation_ends(self) -> list[int]:
        """Tokens each generation request has after the step."""
        return [past + length for past, length in zip(self.pasts, self.generation_lengths, strict=True)]

    def past_column(self, device: torch.device) -> torch.Tensor:
        """Tokens each generation request already has, int64 [B, 1]."""
        return self.remember(("past", device), None, lambda: torch.tensor(self.pasts, device=device).unsqueeze(1))

    def store_generation(self, layer: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new rows of the generation requests behind their pasts; keys and values [B, N, K, D]."""
        store_rows(layer, self.generation_slots, self.pasts, keys, values)

    def count_layer(self) -> int:
        """Index of the next attention layer, for releases whose layers do not tell theirs."""
        self.layers_counted += 1
        return self.layers_counted - 1

    def remember(self, key: Any, sources: Any, make: Callable[[], Any]) -> Any:
        """A value that all layers share, made once a step.

        Args:
            key: what it is; identities (id, data_ptr) in it belong to `sources`.
            sources: the objects behind those identities, held so that they cannot be freed and their identity reused.
            make: computes it.
        """
        if key not in self.memo:
            self.memo[key] = (make(), sources)
        return self.memo[key][0]

    def pad_index(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Index of each packed token in a [requests, longest] grid, int64 [sum(lengths)]."""
        longest = max(lengths)

        def make() -> torch.Tensor:
            counts = torch.tensor(lengths)
            starts = torch.repeat_interleave(torch.arange(len(lengths)) * longest, counts)
            firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
            return (starts + torch.arange(int(counts.sum())) - firsts).to(device)

        return self.remember(("pad", tuple(lengths), device), None, make)


def pad_requests(step: AttentionStep, packed: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Packed rows [T, ...] as [requests, longest, ...]; a view when all requests are equally long."""
    longest = max(lengths)
    if len(lengths) * longest == packed.shape[0]:
        return packed.view(len(lengths), longest, *packed.shape[1:])
    grid = packed.new_zeros((len(lengths) * longest, *packed.shape[1:]))
    grid[step.pad_index(lengths, packed.device)] = packed
    return grid.view(len(lengths), longest, *packed.shape[1:])


def pack_requests(step: AttentionStep, padded: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The inverse of `pad_requests`."""
    flat = padded.reshape(-1, *padded.shape[2:])
    if flat.shape[0] == sum(lengths):
        return flat
    return flat[step.pad_index(lengths, padded.device)]
