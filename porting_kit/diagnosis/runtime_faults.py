"""Faults of the run: tree inputs, cache and heads' outputs handled wrongly. Wrappers around a built model.

A wrapper passes everything on but what it spoils, so wrappers compose in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porting_kit.medusa.tree import pack_mask, unpack_mask


class FaultyModel:
    """A model whose tree inputs, cache or outputs are changed on the way.

    Args:
        model: the model, or another wrapper.
        offsets: changes int32 [N] position offsets.
        mask: changes the bool [N, N] tree mask.
        rows: changes int64 [B, A] rows before the cache keeps them.
        medusa: changes [M, ...] Medusa logits.
    """

    def __init__(
        self,
        model: Any,
        *,
        offsets: Callable[[torch.Tensor], torch.Tensor] | None = None,
        mask: Callable[[torch.Tensor], torch.Tensor] | None = None,
        rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
        medusa: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._model = model
        self._offsets, self._mask, self._rows = offsets, mask, rows
        self._medusa = medusa

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self, *args: Any, **kwargs: Any) -> Any:
        """The model's cache; `keep` is spoilt when `rows` is."""
        cache = self._model.new_cache(*args, **kwargs)
        if self._rows is not None:
            keep, spoil = cache.keep, self._rows
            cache.keep = lambda rows: keep(spoil(rows))
        return cache

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Context phase."""
        return self._spoil_heads(self._model.prefill(*args, **kwargs))

    def decode(
        self,
        tokens: torch.Tensor,
        cache: Any,
        *,
        position_offsets: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> Any:
        """Generation phase with the spoilt inputs."""
        if position_offsets is not None and self._offsets is not None:
            position_offsets = self._offsets(position_offsets)
        if packed_mask is not None and self._mask is not None:
            packed_mask = pack_mask(self._mask(unpack_mask(packed_mask, tokens.shape[1])))
        output = self._model.decode(tokens, cache, position_offsets=position_offsets, packed_mask=packed_mask)
        return self._spoil_heads(output)

    def _spoil_heads(self, output: Any) -> Any:
        if self._medusa is not None and output.medusa_logits is not None:
            output.medusa_logits = self._medusa(output.medusa_logits)
        return output


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


def leave_rows_in_place(model: Any) -> FaultyModel:
    """Lengths grow, but the accepted nodes' keys and values are not moved behind the past."""

    def stay(rows: torch.Tensor) -> torch.Tensor:
        order = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        return torch.where(rows >= 0, order, rows)

    return FaultyModel(model, rows=stay)


def use_rows_of_first_request(model: Any) -> FaultyModel:
    """Every request moves the rows that the first one accepted, with its own count."""

    def share(rows: torch.Tensor) -> torch.Tensor:
        known = rows[:1].clamp(min=0).expand_as(rows)
        return torch.where(rows >= 0, known, rows)

    return FaultyModel(model, rows=share)


class StaleModel(FaultyModel):
    """Right the first time; when the same prompts are decoded again with a tree, logits come from a buffer that was
    not cleared."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._started = False
        self._seen: set[tuple[tuple[int, ...], ...]] = set()
        self._stale = False

    def prefill(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Context phase."""
        self._prompts = tuple(tuple(torch.as_tensor(prompt).tolist()) for prompt in prompts)
        self._started = False
        return super().prefill(prompts, *args, **kwargs)

    def decode(self, tokens: torch.Tensor, cache: Any, **tree: Any) -> Any:
        """Generation phase."""
        if tree.get("packed_mask") is not None and not self._started:
            self._started = True
            self._stale = self._prompts in self._seen
            self._seen.add(self._prompts)
        output = super().decode(tokens, cache, **tree)
        if self._started and self._stale:
            output.logits = output.logits.roll(1, dims=-1)
        return output
