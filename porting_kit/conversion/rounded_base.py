"""A base rounded as a quantised checkpoint rounds it, to another grid: what rounding alone does to this model.

Rounding twice with grids that are shifted against each other gives two independent errors of one size. So the distance
of this one from the base says how far a right checkpoint of the same format may lie, whatever the model and the texts:
small models, and formats of few bits, move by more than large ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from porting_kit.conversion.dequantised import StoredMatrix, read_matrix, require_quantised
from porting_kit.conversion.quantised import weight_scale_name
from porting_kit.conversion.quantised_base import ConvertedBase
from porting_kit.conversion.quantised_comparison import choose_scale, find_shared_scales
from porting_kit.conversion.quantised_files import QuantisedCheckpoint
from porting_kit.conversion.quantised_scales import round_with

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.weight_interleaving import StoredLayout

GRID = 1 / 0.9
"""Scales are so much larger than the largest number asks for: nothing is cut off, and the grid is another one."""


def round_ranks(
    checkpoint: QuantisedCheckpoint, base: ConvertedBase, layout: StoredLayout | None = None
) -> list[dict[str, torch.Tensor]]:
    """Every rank's tensors of the base, the matrices that the checkpoint quantises rounded.

    The smoothing of inputs is the checkpoint's, because it belongs to the format; the scales are the base's own.
    """
    shared = find_shared_scales(checkpoint, base.ranks, layout)
    return [_round_rank(checkpoint, rank, base, layout, shared) for rank in range(len(checkpoint.ranks))]


def _round_rank(
    checkpoint: QuantisedCheckpoint,
    rank: int,
    base: ConvertedBase,
    layout: StoredLayout | None,
    shared: Mapping[tuple[int, str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    algorithm, own = require_quantised(checkpoint), load_file(checkpoint.file(rank))
    tensors = dict(base.ranks[rank])
    for module in checkpoint.modules(rank):
        name = f"{module}.weight"
        if weight_scale_name(own, module) is None or name not in tensors:
            continue
        matrix, wanted = read_matrix(own, module, algorithm, layout), tensors[name].float()
        smoothed = wanted if matrix.prequant is None else wanted / matrix.prequant[None]
        plain = StoredMatrix(matrix.numbers, matrix.scale, None)
        scale = shared.get((rank // checkpoint.tp_size, module))
        scale = choose_scale(smoothed, plain, algorithm) if scale is None else scale
        rounded = round_with(replace(plain, scale=scale * GRID), smoothed, algorithm)
        rounded = rounded if matrix.prequant is None else rounded * matrix.prequant[None]
        tensors[name] = rounded.to(tensors[name].dtype)
    return tensors
