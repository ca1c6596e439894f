"""Quantised checkpoints: does every layer have what the config says of it, heads included?

A TensorRT-LLM checkpoint states one algorithm and a list of modules that are left alone; ModelOpt and upstream's
converters write weights and scales beside each other (quantization/layers.py and models/modeling_utils.py, 0.13; files
of nvidia-modelopt 0.47.0). The library finds a contradiction only while it builds, or not at all.

This module reads headers and scales, never whole weights; `dequantised` does the arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from porting_kit.conversion.quantised_files import Algorithm, QuantisedCheckpoint, read_quantised
from porting_kit.errors import CheckpointError

__all__ = ["QuantisedCheckpoint", "QuantisedFault", "find_faults", "read_quantised", "require_consistent"]

WEIGHT_SCALES = ("weights_scaling_factor", "per_channel_scale")
"""ModelOpt's name, and that of upstream's own converters."""

# Both spellings: releases up to 0.10 look for part of a name, later ones match a pattern.
HEADS_EXCLUDED = ("medusa_heads", "*medusa_heads*")
CALIBRATION_SAMPLES = 128
CACHE_SCALE = "kv_cache_scaling_factor"
CALIBRATED_SCALES = ("activation_scaling_factor", "weights_scaling_factor_2", CACHE_SCALE)
"""Their shapes, signs and presence are judged; the right values depend on calibration texts, which no base holds."""
QUANTISED_TYPES = frozenset({"F8_E4M3", "I8", "U8", "I32"})


@dataclass(frozen=True)
class QuantisedFault:
    """One contradiction.

    Args:
        kind: `no scale`, `scale without need`, `not quantised`, `quantised`, `no calibration`, `value`, `shape`,
            `group`, `setting`, `layers`, `heads`, `cache`, or `not judged` for a quantised tensor that is no matrix of
            a layer; against the base also `config`, `missing`, `surplus` and `dtype`.
        module: dotted name, `rankN:` before it; a field of the config.
        text: what is wrong.
    """

    kind: str
    module: str
    text: str


def find_faults(checkpoint: QuantisedCheckpoint) -> tuple[QuantisedFault, ...]:
    """Every contradiction between config, base, heads and exclude list; empty when there is none."""
    faults = _check_settings(checkpoint)
    for rank in range(len(checkpoint.ranks)):
        modules = checkpoint.modules(rank)
        for module in modules:
            faults += _check_module(checkpoint, rank, module)
        faults += _check_layers(checkpoint, rank)
        faults += _check_heads(checkpoint, rank)
        faults += _check_cache(checkpoint, rank)
        weights = {f"{module}.weight" for module in modules}
        faults += [
            QuantisedFault("not judged", f"rank{rank}: {name}", f"a {kind} tensor {list(shape)} outside the layers")
            for name, (kind, shape) in checkpoint.ranks[rank].items()
            if kind in QUANTISED_TYPES and name not in weights
        ]
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
        expected="a config, weights and scales that agree",
        found=faults[0].module,
        where=checkpoint.folder,
        items=[f"{fault.module}: {fault.kind}" for fault in faults],
        next_step="list in exclude_modules what is left in 16 bit (heads: *medusa_heads*), and quantise the rest",
    )


def weight_scale_name(names: Mapping[str, Any], module: str) -> str | None:
    """The name of a module's weight scale, None when it has none."""
    return next((f"{module}.{suffix}" for suffix in WEIGHT_SCALES if f"{module}.{suffix}" in names), None)


def _check_settings(checkpoint: QuantisedCheckpoint) -> list[QuantisedFault]:
    """Settings of the quantization section by which the library's group-wise layers choose their parameters."""
    algorithm, section = checkpoint.algorithm, checkpoint.quantization
    if algorithm is None or not algorithm.per_group:
        return []
    found = []
    if section.get("has_zero_point"):
        text = f"has_zero_point is true: {algorithm.name} with zero points is not judged here"
        found.append(QuantisedFault("setting", "quantization.has_zero_point", text))
    if not section.get("pre_quant_scale"):
        text = f"pre_quant_scale is not true: the library leaves every prequant_scaling_factor of {algorithm.name} out"
        found.append(QuantisedFault("setting", "quantization.pre_quant_scale", text))
    return found


def _check_module(checkpoint: QuantisedCheckpoint, rank: int, module: str) -> list[QuantisedFault]:
    names, algorithm = checkpoint.ranks[rank], checkpoint.algorithm
    kind, shape = names[f"{module}.weight"]
    is_quantised = kind in QUANTISED_TYPES
    suffixes = (*WEIGHT_SCALES, "weights_scaling_factor_2", "activation_scaling_factor", "prequant_scaling_factor")
    scales = [name for suffix in suffixes if (name := f"{module}.{suffix}") in names]
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
        size = names.get(f"{module}.{suffix}", (None, None))[1]
        if size is None:
            is_calibration = suffix == "activation_scaling_factor" and scale is not None
            found.append(
                QuantisedFault("no calibration" if is_calibration else "no scale", label, f"{suffix} is missing")
            )
            continue
        wanted = shape[-1] if suffix == "prequant_scaling_factor" else 1
        if math.prod(size) != wanted:
            found.append(QuantisedFault("shape", label, f"its {suffix} is {list(size)}, expected {wanted} values"))
        else:
            found += _check_values(checkpoint, rank, module, f"{module}.{suffix}")
    return found


def _check_scale(
    checkpoint: QuantisedCheckpoint, rank: int, module: str, name: str, shape: Sequence[int], algorithm: Algorithm
) -> list[QuantisedFault]:
    """Size and values of a weight scale: one value, one a row, or one a row and group of inputs."""
    rows = count_rows(algorithm, name, shape)
    size, inputs = checkpoint.ranks[rank][name][1], count_inputs(algorithm, name, shape)
    if algorithm.per_group:
        return _check_groups(checkpoint, rank, module, name, rows, inputs)
    if math.prod(size) != 1 and size != (rows,):
        found = f"its scale is {list(size)}, its weight has {rows} rows of {inputs}"
        return [QuantisedFault("shape", f"rank{rank}: {module}", found)]
    return _check_values(checkpoint, rank, module, name)


def _check_groups(
    checkpoint: QuantisedCheckpoint, rank: int, module: str, name: str, rows: int, inputs: int
) -> list[QuantisedFault]:
    """One scale a row and group of inputs, in groups of the size that the config says."""
    size, group = checkpoint.ranks[rank][name][1], checkpoint.group_size
    stated = "" if checkpoint.quantization.get("group_size") else " (the library's, none is stated)"
    text = None
    if inputs % group:
        text = f"groups of {group}{stated} do not divide its {inputs} inputs"
    elif size != (rows, inputs // group):
        text = f"its scale is {list(size)}, groups of {group}{stated} need {[rows, inputs // group]}"
    if text is not None:
        return [QuantisedFault("group", f"rank{rank}: {module}", text)]
    return _check_values(checkpoint, rank, module, name)


def count_rows(algorithm: Algorithm, scale: str, shape: Sequence[int]) -> int:
    """Output rows of a stored weight: ModelOpt puts two rows of 4 bit into one, upstream turns the matrix round."""
    if scale.endswith(".per_channel_scale"):
        return shape[1] * (2 if algorithm.bits == 4 else 1)
    return shape[0] * (2 if algorithm.bits == 4 else 1)


def count_inputs(algorithm: Algorithm, scale: str, shape: Sequence[int]) -> int:
    """Inputs of a stored weight, see `count_rows`."""
    return shape[0] if scale.endswith(".per_channel_scale") else shape[1]


def _check_values(checkpoint: QuantisedCheckpoint, rank: int, module: str, name: str) -> list[QuantisedFault]:
    """A scale of 0, below 0 or not finite makes a layer silently useless."""
    import torch
    from safetensors import safe_open

    with safe_open(checkpoint.file(rank), "pt") as opened:
        values = opened.get_tensor(name).float()
    if bool(torch.isfinite(values).all()) and not bool((values <= 0).any()):
        return []
    what = name.rpartition(".")[2]
    text = f"its {what} holds values that are 0, negative or not finite"
    return [QuantisedFault("value", f"rank{rank}: {module}", text)]


def _check_layers(checkpoint: QuantisedCheckpoint, rank: int) -> list[QuantisedFault]:
    """Every decoder layer of the config must be there, on the rank that holds it, and no other."""
    places = (name.split(".") for name in checkpoint.ranks[rank])
    found = {int(parts[2]) for parts in places if parts[:2] == ["transformer", "layers"] and parts[2].isdecimal()}
    count = checkpoint.config["num_hidden_layers"] // checkpoint.pp_size
    if count > len(checkpoint.ranks[rank]):  # before a set of that size is made
        text = f"the config has {count} layers a stage, the file {len(checkpoint.ranks[rank])} tensors"
        return [QuantisedFault("layers", f"rank{rank}: transformer.layers", text)]
    expected = set(range(count))
    if found == expected:
        return []
    text = f"layers {sorted(found ^ expected)[:5]} are missing or too many: the config has {len(expected)} a stage"
    return [QuantisedFault("layers", f"rank{rank}: transformer.layers", text)]


def _check_heads(checkpoint: QuantisedCheckpoint, rank: int) -> list[QuantisedFault]:
    """Heads and their layers must be those of the config; an earlier pipeline stage may have none."""
    names = [name.split(".") for name in checkpoint.ranks[rank]]
    names = [parts for parts in names if parts[0] == "medusa_heads" and len(parts) > 3]
    heads, layers = (checkpoint.config.get(f"num_medusa_{what}") or 0 for what in ("heads", "layers"))
    is_last = rank >= len(checkpoint.ranks) - checkpoint.tp_size
    if not names and (not heads or not is_last):
        return []
    outputs = {parts[1] for parts in names if parts[2] == "lm_head"}
    found = {(parts[1], parts[3]) for parts in names if parts[2] == "medusa_layers"}
    # counted before sets of that size are made
    if len(outputs) == heads and len(found) == heads * layers:
        numbers = [str(head) for head in range(heads)]
        if outputs == set(numbers) and found == {(head, str(layer)) for head in numbers for layer in range(layers)}:
            return []
    text = f"the config has {heads} heads of {layers} layers, the file {len(outputs)} heads, {len(found)} layers in all"
    return [QuantisedFault("heads", f"rank{rank}: medusa_heads", text)]


def _check_cache(checkpoint: QuantisedCheckpoint, rank: int) -> list[QuantisedFault]:
    """A quantised KV cache needs one scale, of one value, in every layer; one in 16 bit needs none."""
    algorithm, names = checkpoint.quantization.get("kv_cache_quant_algo"), checkpoint.ranks[rank]
    layers = sorted(name.removesuffix(".qkv.weight") for name in names if name.endswith(".attention.qkv.weight"))
    with_scale = sorted(name.removesuffix(f".{CACHE_SCALE}") for name in names if name.endswith(f".{CACHE_SCALE}"))
    found = []
    for layer in dict.fromkeys((*layers, *with_scale)):
        scale, label = f"{layer}.{CACHE_SCALE}", f"rank{rank}: {layer}"
        size = names.get(scale, (None, None))[1]
        if algorithm is None and size is not None:
            text = f"the cache is not quantised, and it has a {CACHE_SCALE}"
            found.append(QuantisedFault("scale without need", label, text))
        elif algorithm is not None and size is None:
            text = f"the cache is {algorithm}, and it has no {CACHE_SCALE}: {len(with_scale)} others have one"
            found.append(QuantisedFault("cache", label, text))
        elif algorithm is not None and layer not in layers:
            text = f"it is no layer with a cache, and it has a {CACHE_SCALE}"
            found.append(QuantisedFault("scale without need", label, text))
        elif algorithm is not None and math.prod(size) != 1:
            found.append(QuantisedFault("shape", label, f"its {CACHE_SCALE} is {list(size)}, expected 1 value"))
        elif algorithm is not None:
            found += _check_values(checkpoint, rank, layer, scale)
    return found


def count_unproven_scales(checkpoint: QuantisedCheckpoint) -> dict[str, int]:
    """Kind of scale -> how many there are in all ranks, of the kinds that calibration gives and no base has."""
    kinds = (name.rpartition(".")[2] for names in checkpoint.ranks for name in names)
    return dict(Counter(kind for kind in kinds if kind in CALIBRATED_SCALES))
