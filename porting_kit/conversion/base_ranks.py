"""A base converted in memory, cut for any ranks: what a checkpoint made by another tool is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.convert import iterate_targets
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.tensor_source import open_tensor_source

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.heads import HeadSet


def convert_ranks(
    base_folder: str | Path,
    *,
    dtype: str,
    tp_size: int = 1,
    pp_size: int = 1,
    heads: HeadSet | None = None,
    release: str | None = None,
) -> tuple[ConversionPlan, list[dict[str, torch.Tensor]]]:
    """The plan for these ranks, and every rank's tensors by name.

    Args:
        base_folder: a Hugging Face folder or a GGUF file.
        heads: joined to the base; None leaves them out.

    Raises:
        BaseModelError, HeadsError, ConversionError: see `plan_conversion`.
    """
    from porting_kit.conversion.apply import cut_piece

    source = open_tensor_source(base_folder)
    base = read_base_config(base_folder, source.names())
    plan = plan_conversion(base, source, tp_size=tp_size, pp_size=pp_size, dtype=dtype, heads=heads, release=release)
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(plan.world_size)]
    for planned, _, whole in iterate_targets(plan, source, heads):
        for piece in planned.pieces:
            ranks[piece.rank][piece.name] = cut_piece(whole, planned, piece).clone()
    return plan, ranks
