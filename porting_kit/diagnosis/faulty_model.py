"""A model whose tree inputs, cache or outputs are changed on the way: what faults of tree and run are made of.

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
