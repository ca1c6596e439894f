"""The ranks of a checkpoint put together to one, by the plan of how this model is cut.

What one rank holds of a tensor follows from the plan. Where a checkpoint of another tool cuts a tensor that the plan
keeps whole (ModelOpt cuts the embedding), the parts are put together along the dimension in which they are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from porting_kit.conversion.apply import join_pieces
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor
from porting_kit.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def join_ranks(
    plan: ConversionPlan, ranks: Sequence[Mapping[str, torch.Tensor]], where: Path
) -> dict[str, torch.Tensor]:
    """The tensors of a one-rank checkpoint, vocabulary padding removed.

    Args:
        plan: of the same base, for the same ranks.
        ranks: every rank's tensors by name.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has a shape that no cut of it has.
        ConversionError: two ranks hold different values where they must agree.
    """
    joined, used = {}, set()
    stage = range(plan.world_size - plan.tp_size, plan.world_size)
    for planned in plan.tensors:
        parts, pieces = [], planned.pieces
        if planned.target.startswith("medusa_heads."):  # the same on every stage; some tools write the last alone
            used |= {(piece.rank, piece.name) for piece in pieces}
            pieces = tuple(piece for piece in pieces if piece.rank in stage)
        for piece in pieces:
            if piece.name not in ranks[piece.rank]:
                raise CheckpointError(
                    "a rank's file lacks a tensor",
                    expected=piece.name,
                    found="no such tensor",
                    where=where / f"rank{piece.rank}.safetensors",
                    next_step="write the checkpoint again, and name the base that it was made of",
                )
            used.add((piece.rank, piece.name))
            parts.append(ranks[piece.rank][piece.name])
        joined[planned.target] = _join(replace(planned, pieces=pieces), parts, where)
    surplus = [(rank, name) for rank, tensors in enumerate(ranks) for name in tensors if (rank, name) not in used]
    if surplus:
        raise CheckpointError(
            f"the checkpoint holds {len(surplus)} tensors that this model has not",
            expected="the tensors of the base's class",
            where=where,
            items=[f"rank{rank}: {name}" for rank, name in surplus],
            next_step="name the base that the checkpoint was made of",
        )
    return joined


def _join(planned: PlannedTensor, parts: Sequence[torch.Tensor], where: Path) -> torch.Tensor:
    if all(part.shape == piece.shape for part, piece in zip(parts, planned.pieces, strict=True)):
        return join_pieces(planned, parts)
    rows = planned.shape[0] - planned.padded_rows
    for dim in range(parts[0].ndim if not planned.pieces[0].slices else 0):
        whole = list(planned.shape)
        sizes = sum(part.shape[dim] for part in parts)
        others = all(part.shape[k] == whole[k] for part in parts for k in range(part.ndim) if k != dim)
        if others and sizes >= whole[dim] and sizes - whole[dim] < len(parts):
            return torch.cat(list(parts), dim).narrow(dim, 0, rows if dim == 0 else whole[dim])
    raise CheckpointError(
        f"{planned.target} is cut in a way that this model's class does not read",
        expected=[list(piece.shape) for piece in planned.pieces],
        found=[list(part.shape) for part in parts],
        where=where,
        next_step="write the checkpoint again, cut as this class reads it",
    )
