"""A quantised checkpoint against the base it was made of: config, 16-bit tensors, and every matrix with its scales.

The distance of a whole matrix shows a scale of another layer, a wrong row order or a wrong group size. A single scale
that is off by a few percent hides in it; `quantised_scales` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.dequantised import StoredMatrix, needs_layout, read_matrix, require_quantised
from porting_kit.conversion.quantised import QuantisedFault, require_consistent, weight_scale_name
from porting_kit.conversion.quantised_base import ConvertedBase
from porting_kit.conversion.quantised_config import NO_RELEASE, STRUCTURE, compare_config, list_unjudged_fields
from porting_kit.conversion.quantised_files import Algorithm, QuantisedCheckpoint, read_quantised
from porting_kit.conversion.quantised_scales import find_scale_fault, round_with
from porting_kit.conversion.unquantised import compare_headers, compare_values
from porting_kit.conversion.weight_interleaving import LAYOUTS, StoredLayout
from porting_kit.errors import CheckpointError

WEIGHT_ERROR_BOUNDS = {8: {"FP8": 0.05, "W8A16": 0.03, "W8A8_SQ_PER_CHANNEL": 0.05}, 4: 0.25}
"""Largest relative error of a whole matrix, by format: rounding alone gives 0.026 (FP8), 0.006 to 0.014 (int8, one
scale a row) and 0.12 (int4, groups of 128) on normal weights, measured on files of nvidia-modelopt 0.47.0."""
ROUNDING_FACTOR = 1.25
"""In a smoothed matrix one large column may stretch the scale of a row: SmolLM2's come to 0.066. Then the bound is what
rounding the base's own matrix with scales of its largest numbers gives, and this much more; ModelOpt's files were
within 1.001 of it."""
ROW_PARALLEL = ("dense", "proj")
"""Matrices that ranks cut along their inputs (layers/attention.py and layers/mlp.py, 0.13.0.dev2024090300)."""


@dataclass(frozen=True)
class WeightError:
    """A quantised matrix against the base's own.

    Args:
        module: dotted name.
        relative_error: norm of the difference over the norm of the base's matrix, both as they are rounded: smoothed
            where the layer smooths its inputs, or columns of small inputs would outweigh all others.
        bound: what rounding explains.
        scale_fault: the row, column or matrix whose scale is off, and by how much; None when all are right.
    """

    module: str
    relative_error: float
    bound: float
    scale_fault: str | None = None

    @property
    def passed(self) -> bool:
        """Within what rounding explains, every scale included; False for a value that is no number."""
        return self.relative_error <= self.bound and self.scale_fault is None


@dataclass(frozen=True)
class BaseComparison:
    """A quantised checkpoint against its base.

    Args:
        differences: of config and of tensors that are not quantised.
        errors: of every quantised matrix; none where the headers alone show another model.
        layout: how the weights were interleaved, None where they are not.
        equal: tensors in 16 bit that are the base's own.
        unknown: tensors of heads that were not at hand.
        unjudged: fields that the config leaves out and of which no default is known.
    """

    differences: tuple[QuantisedFault, ...] = ()
    errors: tuple[WeightError, ...] = ()
    layout: StoredLayout | None = None
    equal: int = 0
    unknown: int = 0
    unjudged: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No difference but rounding."""
        return not self.differences and all(error.passed for error in self.errors)


def compare_base(
    checkpoint: QuantisedCheckpoint, base: ConvertedBase, release: Mapping[str, Any] = NO_RELEASE
) -> BaseComparison:
    """Compare config, 16-bit tensors and quantised matrices; what is of another structure is not looked into.

    Args:
        checkpoint: quantised, without contradictions.
        base: with the checkpoint's heads, where they are known.
        release: field -> what a release's own source takes where the config leaves it out, see `config_defaults`.

    Raises:
        CheckpointError: a matrix has other sizes than the base's, or is the base's in no known layout.
    """
    config = compare_config(checkpoint.config, base.config, base.plan.base, release)
    unjudged = list_unjudged_fields(checkpoint.config, base.config, release)
    if any(fault.module in STRUCTURE for fault in config):
        return BaseComparison(config, unjudged=unjudged)
    headers, values = compare_headers(checkpoint, base.plan), compare_values(checkpoint, base)
    differences, equal, unknown = (*config, *headers, *values.differences), values.equal, values.unknown
    if headers:
        return BaseComparison(differences, equal=equal, unknown=unknown, unjudged=unjudged)
    layout = find_layout(checkpoint, base.ranks)
    errors = compare_ranks(checkpoint, base.ranks, layout)
    return BaseComparison(differences, errors, layout, equal, unknown, unjudged)


def compare_weights(
    source: str | Path, tensors: Mapping[str, torch.Tensor], layout: StoredLayout | None = None
) -> tuple[WeightError, ...]:
    """Every quantised matrix of a one-rank checkpoint against the 16-bit one of the same base, in name order.

    Args:
        source: the quantised checkpoint's folder.
        tensors: the base converted without quantisation, by the same names.
        layout: from `find_layout`, where one is needed.

    Raises:
        CheckpointError: the checkpoint contradicts itself, is sharded, or has a matrix the base has not.
    """
    checkpoint = read_quantised(source)
    require_consistent(checkpoint)
    return compare_ranks(checkpoint, [tensors], layout)


def compare_ranks(
    checkpoint: QuantisedCheckpoint, ranks: Sequence[Mapping[str, torch.Tensor]], layout: StoredLayout | None = None
) -> tuple[WeightError, ...]:
    """The same for any ranks: `ranks` holds the base's tensors cut as the checkpoint's are, one mapping a rank.

    Quantised heads are compared where `ranks` has them.

    Raises:
        CheckpointError: not quantised, other ranks, or a matrix the base has not.
    """
    from safetensors.torch import load_file

    algorithm = require_quantised(checkpoint)
    if len(checkpoint.ranks) != len(ranks):
        raise CheckpointError(
            "the quantised checkpoint is of other ranks than the base it is compared with",
            expected=f"{len(ranks)} ranks",
            found=f"{len(checkpoint.ranks)} ranks",
            where=checkpoint.folder,
            next_step="convert the base for the checkpoint's ranks",
        )
    found, shared = [], find_shared_scales(checkpoint, ranks, layout)
    for rank, wanted in enumerate(ranks):
        own = load_file(checkpoint.file(rank))
        for module in checkpoint.modules(rank):
            if weight_scale_name(own, module) is None or _is_unknown_head(module, wanted):
                continue
            matrix = read_matrix(own, module, algorithm, layout)
            label = module if len(ranks) == 1 else f"rank{rank}: {module}"
            reference = _find_reference(wanted, module, matrix, label)
            scale = shared.get((rank // checkpoint.tp_size, module))
            error, bound = measure_distance(matrix, reference, algorithm, scale)
            found.append(WeightError(label, error, bound, find_scale_fault(matrix, reference, algorithm)))
    return tuple(found)


def find_shared_scales(
    checkpoint: QuantisedCheckpoint, ranks: Sequence[Mapping[str, torch.Tensor]], layout: StoredLayout | None
) -> dict[tuple[int, str], torch.Tensor]:
    """(pipeline stage, module) -> scales [out] that the largest numbers of all its ranks ask for.

    A matrix that is cut along its inputs keeps one scale a row for all ranks, because their products are summed. Where
    inputs are smoothed, the largest numbers of a row may all lie on one rank, and the others are rounded by its scale.
    """
    from safetensors.torch import load_file

    algorithm, found = require_quantised(checkpoint), {}
    if checkpoint.tp_size == 1 or "prequant_scaling_factor" not in algorithm.needs or algorithm.per_group:
        return found
    for rank, wanted in enumerate(ranks):
        own, stage = load_file(checkpoint.file(rank)), rank // checkpoint.tp_size
        for module in checkpoint.modules(rank):
            if module.split(".")[-1] not in ROW_PARALLEL or weight_scale_name(own, module) is None:
                continue
            matrix = read_matrix(own, module, algorithm, layout)
            if f"{module}.weight" in wanted and matrix.scale.ndim == 1 and matrix.scale.numel() > 1:
                smoothed = _find_reference(wanted, module, matrix, module) / matrix.prequant[None]
                scale = choose_scale(smoothed, matrix, algorithm)
                found[stage, module] = torch.maximum(found.get((stage, module), scale), scale)
    return found


def measure_distance(
    matrix: StoredMatrix, wanted: torch.Tensor, algorithm: Algorithm, shared: torch.Tensor | None = None
) -> tuple[float, float]:
    """Relative error of a stored matrix, and what rounding explains of it; see `WeightError`.

    Args:
        matrix: as stored.
        wanted: the base's own, float32 [out, in].
        algorithm: the checkpoint's.
        shared: scales that the matrix has in common with other ranks, from `find_shared_scales`; None for its own.
    """
    bounds = WEIGHT_ERROR_BOUNDS[algorithm.bits]
    bound = bounds if isinstance(bounds, float) else bounds[algorithm.name]
    plain = StoredMatrix(matrix.numbers, matrix.scale, None)
    smoothed = wanted if matrix.prequant is None else wanted / matrix.prequant[None]
    error = _relative(plain.weight, smoothed)
    if matrix.prequant is not None:
        natural = replace(plain, scale=choose_scale(smoothed, plain, algorithm) if shared is None else shared)
        bound = max(bound, ROUNDING_FACTOR * _relative(round_with(natural, smoothed, algorithm), smoothed))
    return error, bound


def choose_scale(wanted: torch.Tensor, matrix: StoredMatrix, algorithm: Algorithm) -> torch.Tensor:
    """Scales of the same form that the largest numbers of a matrix [out, in] ask for."""
    largest = 448.0 if algorithm.name == "FP8" else float((1 << (algorithm.bits - 1)) - 1)
    if matrix.scale.numel() == 1:
        return wanted.abs().amax().reshape(1) / largest
    groups = matrix.scale.shape[1] if matrix.scale.ndim == 2 else 1
    scale = wanted.reshape(len(wanted), groups, -1).abs().amax(-1) / largest
    return scale if matrix.scale.ndim == 2 else scale[:, 0]


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _is_unknown_head(module: str, wanted: Mapping[str, torch.Tensor]) -> bool:
    """A quantised head where only the base is given: nothing to compare it with."""
    return module.startswith("medusa_heads.") and f"{module}.weight" not in wanted


def find_layout(checkpoint: QuantisedCheckpoint, ranks: Sequence[Mapping[str, torch.Tensor]]) -> StoredLayout | None:
    """How upstream's own converter stored the weights: the layout in which they are nearest to the base's.

    None when none is needed. Raises CheckpointError: the weights are the base's in no known layout.
    """
    from safetensors.torch import load_file

    if not needs_layout(checkpoint):
        return None
    algorithm, own = require_quantised(checkpoint), load_file(checkpoint.file(0))
    modules = [module for module in checkpoint.modules(0) if weight_scale_name(own, module) is not None]
    module = max(modules, key=lambda name: own[f"{name}.weight"].shape[0])  # one tile of inputs looks like none
    errors = {}
    for layout in LAYOUTS:
        try:
            matrix = read_matrix(own, module, algorithm, layout)
        except CheckpointError:
            continue
        reference = _find_reference(ranks[0], module, matrix, module)
        errors[layout] = _relative(matrix.weight, reference)
    best = min(errors, key=errors.get, default=None)
    if best is None or not errors[best] < 0.5:
        raise CheckpointError(
            "the weights are the base's in none of the layouts that upstream's converters write",
            expected=", ".join(layout.name for layout in LAYOUTS),
            found=f"{module}: error {errors[best]:.3g} of the base's norm at best" if best else "sizes of none of them",
            where=checkpoint.folder,
            next_step="quantise this base again, or name the base it was made of",
        )
    return best


def _find_reference(tensors: Mapping[str, torch.Tensor], module: str, matrix: StoredMatrix, label: str) -> torch.Tensor:
    wanted = tensors.get(f"{module}.weight")
    if wanted is None or wanted.shape != matrix.numbers.shape:
        raise CheckpointError(
            "the quantised checkpoint and the base do not belong together",
            expected="no such matrix" if wanted is None else list(wanted.shape),
            found=list(matrix.numbers.shape),
            where=label,
            next_step="name the base that the checkpoint was made of",
        )
    return wanted.float()
