"""What a call of an emulated model returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class ModelOutput:
    """What a call returns.

    Args:
        logits: prefill [B, Vp] (or a list of [S_b, Vp] with all_logits), decode [B, N, Vp]; mixed: see there.
        medusa_logits: prefill [M, B, Vp], decode [M, B, N, Vp]; None without Medusa heads.
        hidden_states: what the language-model head saw, [rows, E] in the packed order of the logits' rows.
    """

    logits: Any
    medusa_logits: torch.Tensor | None
    hidden_states: torch.Tensor | None

    def shape_nodes(self, B: int, N: int) -> ModelOutput:
        """Rows of equally large trees as [B, N, Vp] and [M, B, N, Vp]."""
        medusa = self.medusa_logits
        return ModelOutput(
            self.logits.view(B, N, -1),
            None if medusa is None else medusa.view(medusa.shape[0], B, N, -1),
            self.hidden_states,
        )
