"""What a user should know about a conversion that works: casts, padding, tied embeddings, pickles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from porting_kit.conversion.planned import ConversionPlan
from porting_kit.conversion.tensor_source import TensorSource

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet

BLOCK_VALUES = 1 << 21
"""Values of each of two tensors that are compared at a time."""


def list_warnings(plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> tuple[str, ...]:
    """All warnings of a conversion. Values are read only to compare a tied output matrix with the embedding."""
    return (*_plan_warnings(plan, source, heads), *_pickle_warnings(source, heads), *_tied_warning(plan, source))


def _plan_warnings(plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> list[str]:
    warnings = [*heads.warnings, *heads.compare_base(plan.base)] if heads is not None else []
    dtypes = {source.dtype(name) for planned in plan.tensors if planned.origin != "heads" for name in planned.sources}
    if plan.dtype == "float16" and dtypes & {"bfloat16", "float32"}:
        names = ", ".join(sorted(dtypes & {"bfloat16", "float32"}))
        warnings.append(
            f"{names} weights are written as float16: no weight overflows, small ones may lose digits; activations can "
            "still overflow in float16, and align shows whether they do"
        )
    elif plan.dtype == "bfloat16" and dtypes & {"float16", "float32"}:
        warnings.append(f"{', '.join(sorted(dtypes))} weights are written as bfloat16: digits are lost")
    for planned in plan.tensors:
        if planned.padded_rows and planned.target == "lm_head.weight":
            warnings.append(
                f"the vocabulary is padded by {planned.padded_rows} rows to {plan.padded_vocab_size} for "
                f"{plan.tp_size} ranks, in the base and in every head; the padding repeats the last real row"
            )
        if planned.origin == "tied":
            warnings.append(f"tied embeddings: {planned.target} is a copy of {planned.sources[0]}")
    return warnings


def _pickle_warnings(source: TensorSource, heads: HeadSet | None) -> Iterator[str]:
    for one in (source, *([heads.source] if heads is not None else [])):
        files = [file.name for file in one.files() if file.suffix in (".bin", ".pt", ".pth")]
        if files:
            yield (
                f"{files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}: a pickle, read with every class "
                "refused but those of a state dict; safetensors is the safer and faster format"
            )


def _tied_warning(plan: ConversionPlan, source: TensorSource) -> Iterator[str]:
    if not plan.base.tied:
        return
    for planned in plan.tensors:
        if planned.target == "lm_head.weight" and planned.origin == "base":
            (embedding,) = [t.sources[0] for t in plan.tensors if t.target == "transformer.vocab_embedding.weight"]
            if not _are_equal(source, planned.sources[0], embedding):
                yield (
                    f"the config ties the output matrix to the embedding, but {planned.sources[0]} differs from it; "
                    "the file's own matrix is used"
                )


def _are_equal(source: TensorSource, first: str, second: str) -> bool:
    """Whether two tensors hold the same values, compared a few MiB at a time where rows can be read."""
    import torch

    shape = source.shape(first)
    if shape != source.shape(second):
        return False
    if not (source.has_rows(first) and source.has_rows(second)):
        return torch.equal(source.read(first), source.read(second))
    width = shape[-1]
    rows, step = math.prod(shape[:-1]), max(BLOCK_VALUES // max(width, 1), 1)
    return all(
        torch.equal(*(source.read_rows(name, start, min(start + step, rows), width) for name in (first, second)))
        for start in range(0, rows, step)
    )
