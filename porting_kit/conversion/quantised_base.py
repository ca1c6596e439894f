"""The base of a quantised checkpoint, converted in memory for the same ranks: what its weights and config must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.base_config import read_base_config
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.quantised_files import QuantisedCheckpoint
from porting_kit.conversion.tensor_source import open_tensor_source

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.heads import HeadSet


@dataclass(frozen=True)
class ConvertedBase:
    """A base in the checkpoint's dtype, cut as the checkpoint is.

    Args:
        plan: of the conversion.
        config: what the conversion writes into config.json.
        ranks: per rank, tensor name -> tensor.
    """

    plan: ConversionPlan
    config: Mapping[str, Any]
    ranks: Sequence[Mapping[str, torch.Tensor]]


def convert_base(checkpoint: QuantisedCheckpoint, folder: str | Path, heads: HeadSet | None = None) -> ConvertedBase:
    """Convert a quantised checkpoint's base, and its heads where they are known, without quantisation.

    Args:
        checkpoint: gives dtype and ranks.
        folder: the Hugging Face base.
        heads: the heads the checkpoint holds; None where it has none, or they are not known.

    Raises:
        BaseModelError, HeadsError, ConversionError: see `plan_conversion`.
    """
    from porting_kit.conversion.convert import checkpoint_ranks

    ranks = {"tp_size": checkpoint.tp_size, "pp_size": checkpoint.pp_size}
    source = open_tensor_source(folder)
    base = read_base_config(folder, source.names())
    plan = plan_conversion(base, source, dtype=checkpoint.dtype, heads=heads, **ranks)
    config, tensors = checkpoint_ranks(folder, heads, checkpoint.dtype, **ranks)
    return ConvertedBase(plan, config, tensors)
