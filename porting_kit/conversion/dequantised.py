"""The 16-bit checkpoint that a quantised one stands for.

Dequantising loses nothing more: the result multiplies the very numbers the engine multiplies, without the rounding of
activations. So the emulator judges weights, scales and heads of a quantised port; activations in 8 bit it does not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from porting_kit.conversion.quantised import CACHE_SCALE, WEIGHT_SCALES, require_consistent, weight_scale_name
from porting_kit.conversion.quantised_files import Algorithm, QuantisedCheckpoint, read_quantised
from porting_kit.errors import CheckpointError
from porting_kit.whole_files import replace_folder, write_json, write_tensors

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.weight_interleaving import StoredLayout

SCALES = (
    *WEIGHT_SCALES,
    "weights_scaling_factor_2",  # of W4A8: how the product is scaled for FP8; no part of the weight
    "activation_scaling_factor",
    "prequant_scaling_factor",
    CACHE_SCALE,
)
CARD_SCALE = ".per_channel_scale"
"""Upstream's own converters call their scale so, and interleave the weights for a card."""


@dataclass(frozen=True)
class StoredMatrix:
    """One quantised matrix as it is stored.

    Args:
        numbers: [out, in], what the scale multiplies: whole numbers, or those of FP8; float32.
        scale: one value, one a row [out], or one a row and group of inputs [out, groups]; float32.
        prequant: [in], what the layer multiplies its input with; None for 1. float32.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    prequant: torch.Tensor | None

    @property
    def spread_scale(self) -> torch.Tensor:
        """The scale of every number, or what broadcasts to it."""
        if self.scale.numel() == 1:
            return self.scale.reshape(())
        if self.scale.ndim == 2:
            return self.scale.repeat_interleave(self.numbers.shape[1] // self.scale.shape[1], dim=1)
        return self.scale[:, None]

    @property
    def weight(self) -> torch.Tensor:
        """The matrix the layer multiplies with, float32 [out, in]."""
        weight = self.numbers * self.spread_scale
        return weight if self.prequant is None else weight * self.prequant[None]


def read_matrix(
    tensors: Mapping[str, torch.Tensor], module: str, algorithm: Algorithm, layout: StoredLayout | None = None
) -> StoredMatrix:
    """A quantised matrix from the tensors of its rank's file.

    Args:
        tensors: by name; the module's weight is float8_e4m3 or int8 [out, in], 4 bit as two rows in a byte, the even
            row in its low half: [out / 2, in] (nvidia-modelopt 0.47.0, pack_int4_in_uint8); or upstream's own.
        module: dotted name.
        layout: how upstream's own converter stored it, see `weight_interleaving`.

    Raises:
        CheckpointError: a layout is needed and not given, or cannot be the matrix's.
    """
    import torch

    name = weight_scale_name(tensors, module)
    weight, scale = tensors[f"{module}.weight"], tensors[name].to(torch.float32)
    if name.endswith(CARD_SCALE):
        from porting_kit.conversion.weight_interleaving import undo_interleaving

        if layout is None:
            raise CheckpointError(
                "this checkpoint's weights are interleaved for a card, and it does not say for which",
                expected="the card, or weights in plain rows",
                found=name,
                next_step="name the base, which tells the layout by its weights: --base DIR",
            )
        numbers = undo_interleaving(weight, layout, bits=algorithm.bits).to(torch.float32)
    else:
        numbers = unpack_rows(weight) if algorithm.bits == 4 else weight.to(torch.float32)
    prequant = tensors.get(f"{module}.prequant_scaling_factor")
    return StoredMatrix(numbers, scale, None if prequant is None else prequant.to(torch.float32).reshape(-1))


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """[out / 2, in] bytes to [out, in] whole numbers from -8 to 7, float32."""
    import torch

    bytes_ = packed.view(torch.uint8).to(torch.int16)
    low, high = bytes_ & 15, bytes_ >> 4
    rows = torch.stack([low, high], dim=1).reshape(-1, packed.shape[1])
    return torch.where(rows > 7, rows - 16, rows).to(torch.float32)


def needs_layout(checkpoint: QuantisedCheckpoint) -> bool:
    """Whether weights are interleaved for a card, so that reading them back needs to know which."""
    return any(name.endswith(CARD_SCALE) for rank in checkpoint.ranks for name in rank)


def dequantise_rank(
    checkpoint: QuantisedCheckpoint, rank: int, dtype: str, layout: StoredLayout | None = None
) -> dict[str, torch.Tensor]:
    """One rank's tensors without its scales, every matrix as it multiplies, in one dtype."""
    import torch
    from safetensors.torch import load_file

    tensors, wanted = load_file(checkpoint.file(rank)), getattr(torch, dtype)
    algorithm = checkpoint.algorithm
    for module in checkpoint.modules(rank):
        if algorithm is not None and weight_scale_name(tensors, module) is not None:
            tensors[f"{module}.weight"] = read_matrix(tensors, module, algorithm, layout).weight.to(wanted)
    return {
        name: tensor.to(wanted).contiguous()
        for name, tensor in tensors.items()
        if name.rpartition(".")[2] not in SCALES
    }


def write_dequantised(
    source: str | Path, target: Path, *, dtype: str | None = None, layout: StoredLayout | None = None
) -> Path:
    """Write the 16-bit checkpoint that a quantised one stands for, for the same ranks.

    Args:
        source: the quantised checkpoint's folder.
        target: where the other goes; what is there is replaced when it is complete.
        dtype: of its weights; the config's when None.
        layout: how upstream's own converter stored the weights, see `quantised_comparison.find_layout`.

    Raises:
        CheckpointError: the checkpoint contradicts itself, lacks calibration, or is not quantised.
    """
    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    require_quantised(checkpoint)
    dtype = dtype or checkpoint.dtype
    config = {**checkpoint.config, "dtype": dtype}
    config["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": None}
    if len(checkpoint.ranks) == 1:
        config["use_parallel_embedding"] = False  # ModelOpt says True for one rank too, where it means nothing
    with replace_folder(target) as folder:
        for rank in range(len(checkpoint.ranks)):
            write_tensors(folder / f"rank{rank}.safetensors", dequantise_rank(checkpoint, rank, dtype, layout))
        write_json(folder / "config.json", config)
    return target


def require_quantised(checkpoint: QuantisedCheckpoint) -> Algorithm:
    """The checkpoint's algorithm. Raises CheckpointError: it has none."""
    if checkpoint.algorithm is None:
        raise CheckpointError(
            "the checkpoint is not quantised",
            expected="a quant_algo in config.json",
            found="none",
            where=checkpoint.folder,
            next_step="name the quantised checkpoint; one in 16 bit needs no dequantising",
        )
    return checkpoint.algorithm
