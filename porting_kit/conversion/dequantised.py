"""The 16-bit checkpoint that a quantised one stands for, and heads in 16 bit beside a quantised base.

Dequantising loses nothing more: the result multiplies the very numbers the engine multiplies, without the rounding of
activations. So the emulator judges weights, scales and heads of a quantised port; activations in 8 bit it does not do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.conversion.quantised import (
    HEADS_EXCLUDED,
    WEIGHT_SCALES,
    QuantisedCheckpoint,
    read_quantised,
    require_consistent,
    weight_scale_name,
)
from porting_kit.errors import CheckpointError
from porting_kit.run_folder import replace_folder, write_json

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.heads import HeadSet

SCALES = (*WEIGHT_SCALES, "activation_scaling_factor", "prequant_scaling_factor", "kv_cache_scaling_factor")


def dequantise_weight(
    weight: torch.Tensor, scale: torch.Tensor, prequant: torch.Tensor | None, *, bits: int
) -> torch.Tensor:
    """The matrix a quantised layer multiplies with, float32 [out, in].

    Args:
        weight: float8_e4m3 or int8 [out, in]; 4 bit as two rows in a byte, the even row in its low half: [out / 2, in]
            (nvidia-modelopt 0.47.0, pack_int4_in_uint8).
        scale: one value, one a row [out], or one a row and group [out, in / group].
        prequant: [in], what the layer multiplies its input with; None for 1.
        bits: 4 or 8.
    """
    import torch

    values = _unpack_rows(weight) if bits == 4 else weight.to(torch.float32)
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        values = values * scale.reshape(())
    elif scale.ndim == 2:
        values = values * scale.repeat_interleave(values.shape[1] // scale.shape[1], dim=1)
    else:
        values = values * scale[:, None]
    return values if prequant is None else values * prequant.to(torch.float32)[None]


def _require_open_layout(checkpoint: QuantisedCheckpoint) -> None:
    """Upstream's own int8 and int4 files hold weights interleaved for one kind of card; nothing here undoes that.

    Source: models/convert_utils.py 0.13.0.dev2024090300 (symmetric_quantize_last_axis_of_batched_matrix).
    """
    names = [name for rank in checkpoint.ranks for name in rank if name.endswith(".per_channel_scale")]
    if names or (checkpoint.algorithm is not None and checkpoint.algorithm.name == "W4A16"):
        raise CheckpointError(
            "this checkpoint's weights are interleaved for a card, so their values cannot be read back",
            expected="a checkpoint of ModelOpt, with weights_scaling_factor",
            found=names[0] if names else "W4A16",
            where=checkpoint.folder,
            next_step="quantise with ModelOpt, or judge the engine by its captured output",
        )


def _unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """[out / 2, in] bytes to [out, in] whole numbers from -8 to 7, float32."""
    import torch

    bytes_ = packed.view(torch.uint8).to(torch.int16)
    low, high = bytes_ & 15, bytes_ >> 4
    rows = torch.stack([low, high], dim=1).reshape(-1, packed.shape[1])
    return torch.where(rows > 7, rows - 16, rows).to(torch.float32)


def write_dequantised(source: str | Path, target: Path, *, dtype: str | None = None) -> Path:
    """Write the 16-bit checkpoint that a quantised one stands for.

    Args:
        source: the quantised checkpoint's folder.
        target: where the other goes; what is there is replaced when it is complete.
        dtype: of its weights; the config's when None.

    Raises:
        CheckpointError: the checkpoint contradicts itself, lacks calibration, or is not quantised.
    """
    import torch
    from safetensors.torch import load_file, save_file

    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    algorithm = checkpoint.algorithm
    if algorithm is None:
        raise CheckpointError("the checkpoint is not quantised", where=checkpoint.folder)
    _require_open_layout(checkpoint)
    dtype = dtype or str(checkpoint.config["dtype"])
    config = {**checkpoint.config, "dtype": dtype}
    config["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": None}
    if len(checkpoint.ranks) == 1:
        config["use_parallel_embedding"] = False  # ModelOpt says True for one rank too, where it means nothing
    with replace_folder(target) as folder:
        for rank in range(len(checkpoint.ranks)):
            tensors = load_file(checkpoint.file(rank))
            quantised = [module for module in checkpoint.modules(rank) if weight_scale_name(tensors, module)]
            for module in quantised:
                tensors[f"{module}.weight"] = dequantise_weight(
                    tensors[f"{module}.weight"],
                    tensors[weight_scale_name(tensors, module)],
                    tensors.get(f"{module}.prequant_scaling_factor"),
                    bits=algorithm.bits,
                )
            kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in SCALES}
            wanted = getattr(torch, dtype)
            save_file(
                {name: tensor.to(wanted).contiguous() for name, tensor in kept.items()},
                folder / f"rank{rank}.safetensors",
            )
        write_json(folder / "config.json", config)
    return target


def add_heads(source: str | Path, heads: HeadSet, target: Path, *, max_draft_len: int) -> Path:
    """Add Medusa heads in 16 bit to a quantised base, and say in the exclude list that they are.

    Args:
        source: the quantised base's folder.
        heads: the heads; they must have output matrices of their own, or the base's must be in 16 bit.
        target: where the joined checkpoint goes; what is there is replaced when it is complete.
        max_draft_len: draft tokens of the largest tree.

    Raises:
        CheckpointError: the base contradicts itself, has heads already, or its output matrix is quantised and shared.
    """
    import torch
    from safetensors.torch import load_file, save_file

    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    _require_fit(checkpoint, heads)
    config = _config_with_heads(checkpoint.config, checkpoint, heads, max_draft_len)
    dtype = getattr(torch, str(checkpoint.config["dtype"]))
    mapping = checkpoint.config.get("mapping") or {}
    tp_size = int(mapping.get("tp_size", 1))
    with replace_folder(target) as folder:
        for rank in range(len(checkpoint.ranks)):
            tensors = load_file(checkpoint.file(rank))
            if "lm_head.weight" in tensors:  # the last pipeline stage, which has the heads as well
                for name in heads.origins:
                    part = heads.read(name).to(dtype).chunk(tp_size)[rank % tp_size]
                    tensors[name] = part.clone()
                for head in range(0 if heads.own_output else heads.num_heads):
                    tensors[f"medusa_heads.{head}.lm_head.weight"] = tensors["lm_head.weight"].to(dtype).clone()
            save_file(tensors, folder / f"rank{rank}.safetensors")
        write_json(folder / "config.json", config)
    require_consistent(read_quantised(target))
    return target


def _require_fit(checkpoint: QuantisedCheckpoint, heads: HeadSet) -> None:
    config, where = checkpoint.config, checkpoint.folder
    if config.get("num_medusa_heads"):
        raise CheckpointError(
            "the checkpoint has Medusa heads already",
            found=f"num_medusa_heads {config['num_medusa_heads']}",
            where=where,
        )
    if heads.hidden_size != config.get("hidden_size"):
        raise CheckpointError(
            "heads and quantised base differ in hidden size",
            expected=config.get("hidden_size"),
            found=heads.hidden_size,
            where=heads.where,
        )
    kind, shape = checkpoint.ranks[-1].get("lm_head.weight", ("none", (0,)))
    rows = shape[0] * int((config.get("mapping") or {}).get("tp_size", 1))
    if heads.own_output and heads.vocab_size != rows:
        raise CheckpointError(
            "heads and quantised base differ in output rows", expected=rows, found=heads.vocab_size, where=heads.where
        )
    if not heads.own_output and kind not in ("F16", "BF16", "F32"):
        raise CheckpointError(
            "the heads share the base's output matrix, and that is quantised",
            next_step="leave lm_head out of the quantisation, or train heads with output matrices of their own",
            where=where,
        )


def _config_with_heads(
    config: Mapping[str, Any], checkpoint: QuantisedCheckpoint, heads: HeadSet, max_draft_len: int
) -> dict[str, Any]:
    joined = json.loads(json.dumps(config))
    joined |= {
        "num_medusa_heads": heads.num_heads,
        "num_medusa_layers": heads.num_layers,
        "medusa_hidden_act": "silu",
        "max_draft_len": max_draft_len,
    }
    if checkpoint.algorithm is not None:
        # A list of one's own takes the place of upstream's, so its entries are kept.
        joined["quantization"]["exclude_modules"] = list(dict.fromkeys((*checkpoint.excluded, *HEADS_EXCLUDED)))
    return joined


WEIGHT_ERROR_BOUNDS = {8: {"FP8": 0.05, "W8A16": 0.03, "W8A8_SQ_PER_CHANNEL": 0.05}, 4: 0.25}
"""Largest relative error of a whole matrix, by format: rounding alone gives 0.026 (FP8), 0.006 to 0.014 (int8, one
scale a row) and 0.12 (int4, groups of 128) on normal weights, measured on files of nvidia-modelopt 0.47.0."""


@dataclass(frozen=True)
class WeightError:
    """A quantised matrix against the base's own.

    Args:
        module: dotted name.
        relative_error: norm of the difference over the norm of the base's matrix.
        bound: what rounding explains.
    """

    module: str
    relative_error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Within what rounding explains; False for a value that is no number."""
        return self.relative_error <= self.bound


def compare_weights(source: str | Path, tensors: Mapping[str, torch.Tensor]) -> tuple[WeightError, ...]:
    """Every quantised matrix of a one-rank checkpoint against the 16-bit one of the same base, in file order.

    A scale of another layer, a wrong row order or a wrong group size shows here, by name, before anything runs.

    Args:
        source: the quantised checkpoint's folder.
        tensors: the base converted without quantisation, by the same names.

    Raises:
        CheckpointError: the checkpoint contradicts itself, is sharded, or has a matrix the base has not.
    """
    from safetensors.torch import load_file

    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    algorithm = checkpoint.algorithm
    if algorithm is None or len(checkpoint.ranks) != 1:
        raise CheckpointError(
            "only a quantised checkpoint of one rank can be compared with its base",
            found="not quantised" if algorithm is None else f"{len(checkpoint.ranks)} ranks",
            where=checkpoint.folder,
        )
    _require_open_layout(checkpoint)
    bounds = WEIGHT_ERROR_BOUNDS[algorithm.bits]
    bound = bounds if isinstance(bounds, float) else bounds[algorithm.name]
    own, found = load_file(checkpoint.file(0)), []
    for module in checkpoint.modules(0):
        scale = weight_scale_name(own, module)
        if scale is None:
            continue
        wanted = tensors.get(f"{module}.weight")
        weight = dequantise_weight(
            own[f"{module}.weight"], own[scale], own.get(f"{module}.prequant_scaling_factor"), bits=algorithm.bits
        )
        if wanted is None or wanted.shape != weight.shape:
            raise CheckpointError(
                "the quantised checkpoint and the base do not belong together",
                expected="no such matrix" if wanted is None else list(wanted.shape),
                found=list(weight.shape),
                where=module,
            )
        difference = (weight - wanted.float()).norm() / wanted.float().norm()
        found.append(WeightError(module, float(difference), bound))
    return tuple(found)
