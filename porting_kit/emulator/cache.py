"""The KV cache: one preallocated tensor per layer, rows written ahead and kept after acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from porting_kit.errors import EmulatorError


class KVCache:
    """Keys and values of B requests, [B, 2, K, capacity, D] per layer, allocated when a layer first writes.

    Args:
        batch_size: B.
        capacity_tokens: tokens that a request may hold, draft rows included.
        device: where the tensors live.
        attention_window: tokens that a query may see, itself included; one number, one per layer, or None for all.

    Attributes:
        lengths: tokens that count, int64 [B] on the CPU; rows behind them are drafts that may be overwritten.
        context_lengths: prompt lengths, int64 [B].
        iterations: generation steps since each request's prompt, int64 [B].
    """

    def __init__(
        self,
        batch_size: int,
        capacity_tokens: int,
        *,
        device: torch.device | str = "cpu",
        attention_window: int | Sequence[int] | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.capacity = capacity_tokens
        self.device = torch.device(device)
        self.attention_window = attention_window
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.context_lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.iterations = torch.zeros(batch_size, dtype=torch.int64)
        self._layers: dict[int, torch.Tensor] = {}
        # All layers as one tensor [layers, B, 2, K, capacity, D], once they were joined.
        self.joined: torch.Tensor | None = None
        # Rows of the last decode that have not been kept yet.
        self.pending_rows = 0
        # Decode steps recorded over these tensors (see replay.py).
        self.recordings: dict[tuple, Any] = {}
        self.recording_pool: Any = None

    def layer(self, index: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of a layer, [B, 2, K, capacity, D]."""
        tensor = self._layers.get(index)
        if tensor is None:
            shape = (self.batch_size, 2, kv_heads, self.capacity, head_size)
            tensor = self._layers[index] = torch.zeros(shape, dtype=dtype, device=self.device)
        return tensor

    @property
    def layer_indices(self) -> list[int]:
        """Indices of the layers that have been written."""
        return sorted(self._layers)

    @property
    def layers(self) -> list[torch.Tensor]:
        """The tensors of those layers."""
        return [self._layers[index] for index in self.layer_indices]

    def hold(self, layers: dict[int, torch.Tensor]) -> None:
        """Use these tensors as the layers."""
        self._layers = layers

    def join(self) -> None:
        """Let layers of one shape be parts of one tensor, so that rows of all of them can be moved at once."""
        layers = self.layers
        if self.joined is None and layers and len({layer.shape for layer in layers}) == 1:
            self.joined = torch.stack(layers)
            self._layers = dict(zip(self.layer_indices, self.joined, strict=True))

    def window(self, layer: int) -> int | None:
        """Tokens a query of this layer may see, itself included; None for all."""
        window = self.attention_window
        if window is None or isinstance(window, int):
            return window
        return window[layer % len(window)]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep accepted rows of the last decode: row past + rows[b, i] moves to past + i, the length grows.

        Args:
            rows: int64 [B, A], node indices of the accepted path in order, padded with -1 at the end.

        Raises:
            EmulatorError: a row was not written by the last decode, or a row follows padding.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64, device="cpu").reshape(self.batch_size, -1)
        is_kept = rows >= 0
        counts = is_kept.sum(1)
        if bool((rows >= self.pending_rows).any()) or bool((is_kept[:, 1:] & ~is_kept[:, :-1]).any()):
            raise EmulatorError(
                "KVCache.keep was given rows that the last decode did not write",
                expected=f"indices below {self.pending_rows}, -1 only at the end",
                found=rows.tolist(),
                next_step="keep the node indices of one accepted path, once after each decode",
            )
        steps = torch.arange(rows.shape[1]).expand_as(rows)
        is_moved = is_kept & (rows != steps)
        if bool(is_moved.any()):
            request, step = is_moved.nonzero(as_tuple=True)
            source = (self.lengths[request] + rows[request, step]).to(self.device)
            target = (self.lengths[request] + step).to(self.device)
            request = request.to(self.device)
            for tensor in self._layers.values():
                tensor[request, :, :, target] = tensor[request, :, :, source]
        self.lengths = self.lengths + counts
        self.iterations = self.iterations + 1
        self.pending_rows = 0

    def rewind(self, lengths: torch.Tensor | Sequence[int]) -> None:
        """Forget tokens behind the given lengths.

        Args:
            lengths: int64 [B], none longer than what the cache holds.
        """
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").reshape(self.batch_size)
        if bool((lengths > self.lengths).any()) or bool((lengths < 0).any()):
            raise EmulatorError(
                "KVCache.rewind cannot make a request longer",
                expected=f"at most {self.lengths.tolist()}",
                found=lengths.tolist(),
                next_step="decode first, then keep or rewind",
            )
        self.lengths = lengths.clone()
        self.pending_rows = 0

    def check_room(self, requests: Sequence[int], needed: Sequence[int]) -> None:
        """Raise EmulatorError when a request would outgrow the capacity."""
        if max(needed, default=0) > self.capacity:
            raise EmulatorError(
                "the KV cache is full",
                expected=f"at most {self.capacity} tokens a request, draft rows included",
                found=f"{max(needed)} tokens",
                next_step="make the cache with a larger capacity_tokens",
            )


def store_rows(
    layer: torch.Tensor, slots: Sequence[int], starts: Sequence[int], keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write keys and values into the cache.

    Args:
        layer: [B, 2, K, capacity, D].
        slots: cache row of each request.
        starts: first token position to write of each request.
        keys, values: [requests, S, K, D].
    """
    S = keys.shape[1]
    for kind, rows in enumerate((keys.transpose(1, 2), values.transpose(1, 2))):
        if len(set(starts)) == 1 and is_run(slots):
            layer[slots[0] : slots[0] + len(slots), kind, :, starts[0] : starts[0] + S] = rows
            continue
        for index, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            layer[slot, kind, :, start : start + S] = rows[index]


def is_run(slots: Sequence[int]) -> bool:
    """Whether cache rows follow one another, so that a slice takes them all."""
    return all(slot == slots[0] + index for index, slot in enumerate(slots))
