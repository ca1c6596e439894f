"""An oracle that runs given texts once, for their logits and for the hidden states that heads read.

A pass over a text gives both; whoever asks for one after the other, or for the logits again, would otherwise pay for it
again. Kept are the logits and the last states, of the given texts alone: no layer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch


class ContextSource(Protocol):
    """`reference.Reference` or `fit.ContextOracle`."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def read(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [S, V], and hidden states [S, E] (None on a pipeline rank that has none), of one text."""


class RememberedOracle:
    """A judge that is right as long as nobody changes the model.

    Args:
        source: the base, or a port.
        texts: token ids; others are run whenever they are asked for. None remembers all.
    """

    def __init__(self, source: ContextSource, texts: Iterable[Sequence[int]] | None = None) -> None:
        self._source = source
        self._wanted = None if texts is None else {_key(text) for text in texts}
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor | None]] = {}

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._source.vocab_size

    def logits(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[S, V] per text."""
        return [self._read(text)[0] for text in texts]

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
        """What the output matrix and the heads see, [S, E] per text; None on a pipeline rank that has none."""
        found = [self._read(text)[1] for text in texts]
        return None if any(states is None for states in found) else found

    def _read(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        key = _key(text)
        if self._wanted is not None and key not in self._wanted:
            return self._source.read(text)
        if key not in self._known:
            self._known[key] = self._source.read(text)
        return self._known[key]


def _key(text: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, text))
