"""Quantised checkpoints: does every layer have what the config says of it, heads included?

A TensorRT-LLM checkpoint states one algorithm and a list of modules that are left alone; ModelOpt and upstream's
converters write weights and scales beside each other (quantization/layers.py and models/modeling_utils.py, 0.13; files
of nvidia-modelopt 0.47.0). The library finds a contradiction only while it builds, or not at all.

This module reads headers and scales, never whole weights; `dequantised` does the arithmetic.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from porting_kit.errors import CheckpointError
from porting_kit.run_folder import read_json

WEIGHT_SCALES = ("weights_scaling_factor", "per_channel_scale")
"""ModelOpt's name, and that of upstream's own converters."""

# What upstream leaves alone when the config has no list (quantization/quantize.py 0.13.0.dev2024090300).
DEFAULT_EXCLUDED = (
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate",
)  # fmt: skip
# Both spellings: releases up to 0.10 look for part of a name, later ones match a pattern.
HEADS_EXCLUDED = ("medusa_heads", "*medusa_heads*")
LINEAR_MODULES = ("qkv", "dense", "fc", "gate", "proj", "linear", "lm_head", "fused_fc", "router")
CALIBRATION_SAMPLES = 128


@dataclass(frozen=True)
class Algorithm:
    """What a quantised layer of one algorithm has.

    Args:
        name: quant_algo of the config.
        weight_types: safetensors types of its weights.
        bits: of a weight.
        needs: suffixes beside the weight scale.
        per_group: the weight scale has a column for each group of inputs.
    """

    name: str
    weight_types: tuple[str, ...]
    bits: int
    needs: tuple[str, ...] = ()
    per_group: bool = False


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("FP8", ("F8_E4M3",), 8, ("activation_scaling_factor",)),
        Algorithm("W8A16", ("I8",), 8),
        Algorithm("W8A8_SQ_PER_CHANNEL", ("I8",), 8, ("activation_scaling_factor", "prequant_scaling_factor")),
        Algorithm("W4A16", ("I8", "U8"), 4),
        Algorithm("W4A16_AWQ", ("I8", "U8"), 4, ("prequant_scaling_factor",), per_group=True),
        Algorithm(
            "W4A8_AWQ", ("I8", "U8"), 4, ("prequant_scaling_factor", "activation_scaling_factor"), per_group=True
        ),
    )
}
QUANTISED_TYPES = frozenset({"F8_E4M3", "I8", "U8", "I32"})


@dataclass(frozen=True)
class QuantisedFault:
    """One contradiction.

    Args:
        kind: `no scale`, `scale without need`, `not quantised`, `quantised`, `no calibration`, `value`, `shape` or
            `cache`.
        module: dotted name, `rankN:` before it.
        text: what is wrong.
    """

    kind: str
    module: str
    text: str


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """A checkpoint's config and the headers of its tensors.

    Args:
        folder: where it is.
        config: content of config.json.
        ranks: per rank, tensor name -> (type, shape).
    """

    folder: Path
    config: Mapping[str, Any]
    ranks: tuple[Mapping[str, tuple[str, tuple[int, ...]]], ...]

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The config's section, empty for none."""
        return self.config.get("quantization") or {}

    @cached_property
    def algorithm(self) -> Algorithm | None:
        """The algorithm, None for a checkpoint that is not quantised. Raises CheckpointError: an unknown one."""
        name = self.quantization.get("quant_algo")
        if name is None:
            return None
        if name not in ALGORITHMS:
            raise CheckpointError(
                "the checkpoint's quantisation is not one this project can judge",
                expected=", ".join(ALGORITHMS),
                found=name,
                where=self.folder / "config.json",
            )
        return ALGORITHMS[name]

    @property
    def excluded(self) -> tuple[str, ...]:
        """Patterns of modules that are left alone."""
        stated = self.quantization.get("exclude_modules")
        return DEFAULT_EXCLUDED if stated is None else tuple(stated)

    def is_excluded(self, module: str) -> bool:
        """Whether the config leaves a module alone, in either of upstream's two readings."""
        return any(fnmatch.fnmatchcase(module, pattern) or pattern in module.split(".") for pattern in self.excluded)

    def modules(self, rank: int) -> list[str]:
        """Modules with a matrix that quantisation is about."""
        names = self.ranks[rank]
        return sorted(
            name.removesuffix(".weight")
            for name, (_, shape) in names.items()
            if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] in LINEAR_MODULES
        )

    def file(self, rank: int) -> Path:
        """The rank's weights."""
        return self.folder / f"rank{rank}.safetensors"


def read_quantised(folder: str | Path) -> QuantisedCheckpoint:
    """Read a checkpoint's config and headers.

    Raises:
        CheckpointError: a file is missing, empty or damaged.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError("the checkpoint has no readable config.json", found=error, where=folder) from None
    if not isinstance(config, dict) or not isinstance(config.get("mapping", {}), dict):
        raise CheckpointError("the checkpoint's config.json is no checkpoint's", where=folder / "config.json")
    mapping = config.get("mapping") or {}
    count = int(mapping.get("tp_size", 1)) * int(mapping.get("pp_size", 1))
    ranks = []
    for rank in range(count):
        file = folder / f"rank{rank}.safetensors"
        try:
            with safe_open(file, "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
                ranks.append({name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "a checkpoint file is missing or damaged", found=error, where=file, next_step="quantise again"
            ) from None
    return QuantisedCheckpoint(folder, config, tuple(ranks))


def find_faults(checkpoint: QuantisedCheckpoint) -> tuple[QuantisedFault, ...]:
    """Every contradiction between config, base, heads and exclude list; empty when there is none."""
    faults: list[QuantisedFault] = []
    for rank in range(len(checkpoint.ranks)):
        for module in checkpoint.modules(rank):
            faults += _check_module(checkpoint, rank, module)
        faults += _check_cache(checkpoint, rank)
    return tuple(faults)


def require_consistent(checkpoint: QuantisedCheckpoint) -> None:
    """Refuse a checkpoint that contradicts itself.

    Raises:
        CheckpointError: quantised without calibration, or any other fault; names the modules.
    """
    faults = find_faults(checkpoint)
    if not faults:
        return
    uncalibrated = [fault for fault in faults if fault.kind == "no calibration"]
    if uncalibrated:
        raise CheckpointError(
            f"this checkpoint was quantised without calibration: {len(uncalibrated)} activation scales are absent",
            expected="an activation_scaling_factor for every quantised layer",
            where=checkpoint.folder,
            items=[fault.module for fault in uncalibrated],
            next_step=f"quantise again with at least {CALIBRATION_SAMPLES} samples, or use weight-only quantisation",
        )
    raise CheckpointError(
        f"the quantised checkpoint contradicts itself in {len(faults)} places: {faults[0].text}",
        found=faults[0].module,
        where=checkpoint.folder,
        items=[f"{fault.module}: {fault.kind}" for fault in faults],
        next_step="list in exclude_modules what is left in 16 bit (heads: *medusa_heads*), and quantise the rest",
    )


def weight_scale_name(names: Mapping[str, Any], module: str) -> str | None:
    """The name of a module's weight scale, None when it has none."""
    return next((f"{module}.{suffix}" for suffix in WEIGHT_SCALES if f"{module}.{suffix}" in names), None)


def _check_module(checkpoint: QuantisedCheckpoint, rank: int, module: str) -> list[QuantisedFault]:
    names, algorithm = checkpoint.ranks[rank], checkpoint.algorithm
    kind, shape = names[f"{module}.weight"]
    is_quantised = kind in QUANTISED_TYPES
    scales = [name for suffix in (*WEIGHT_SCALES, "activation_scaling_factor", "prequant_scaling_factor")
              if (name := f"{module}.{suffix}") in names]  # fmt: skip
    label = f"rank{rank}: {module}"
    if algorithm is None or checkpoint.is_excluded(module):
        why = "the config names no quantisation" if algorithm is None else "the exclude list leaves it alone"
        found = []
        if is_quantised:
            found.append(QuantisedFault("quantised", label, f"{why}, and its weight is {kind}"))
        if scales:
            found.append(QuantisedFault("scale without need", label, f"{why}, and it has {len(scales)} scales"))
        return found
    if not is_quantised:
        return [QuantisedFault("not quantised", label, f"the config says {algorithm.name}, its weight is {kind}")]
    if kind not in algorithm.weight_types:
        expected = " or ".join(algorithm.weight_types)
        return [QuantisedFault("not quantised", label, f"{algorithm.name} wants {expected}, its weight is {kind}")]
    found = []
    scale = weight_scale_name(names, module)
    if scale is None:
        found.append(QuantisedFault("no scale", label, "its weight has no scale"))
    else:
        found += _check_scale(checkpoint, rank, module, scale, shape, algorithm)
    for suffix in algorithm.needs:
        if f"{module}.{suffix}" not in names:
            is_calibration = suffix == "activation_scaling_factor" and scale is not None
            found.append(
                QuantisedFault("no calibration" if is_calibration else "no scale", label, f"{suffix} is missing")
            )
    return found


def _check_scale(
    checkpoint: QuantisedCheckpoint, rank: int, module: str, name: str, shape: Sequence[int], algorithm: Algorithm
) -> list[QuantisedFault]:
    """Size and values of a weight scale. A scale of 0, below 0 or not finite makes a layer silently useless."""
    import torch
    from safetensors import safe_open

    rows = shape[0] * (2 if algorithm.bits == 4 and algorithm.per_group else 1)
    size = checkpoint.ranks[rank][name][1]
    count = 1
    for dimension in size:
        count *= dimension
    label = f"rank{rank}: {module}"
    if count != 1 and (not size or rows not in size):
        return [QuantisedFault("shape", label, f"its scale is {list(size)}, its weight has {rows} rows")]
    with safe_open(checkpoint.file(rank), "pt") as opened:
        values = opened.get_tensor(name).float()
    if not bool(torch.isfinite(values).all()) or bool((values <= 0).any()):
        return [QuantisedFault("value", label, "its scale holds values that are 0, negative or not finite")]
    return []


def _check_cache(checkpoint: QuantisedCheckpoint, rank: int) -> list[QuantisedFault]:
    """A quantised KV cache needs a scale in every layer."""
    algorithm = checkpoint.quantization.get("kv_cache_quant_algo")
    names = checkpoint.ranks[rank]
    layers = [name.removesuffix(".qkv.weight") for name in names if name.endswith(".attention.qkv.weight")]
    if algorithm is None:
        return []
    return [
        QuantisedFault(
            "cache", f"rank{rank}: {layer}", f"the cache is {algorithm}, and it has no kv_cache_scaling_factor"
        )
        for layer in sorted(layers)
        if f"{layer}.kv_cache_scaling_factor" not in names
    ]
