"""The transforms that change no value: pad heads, pad query groups, fold the query scaling.

Each is a pure function (config, tensors) -> (config, tensors, note) on a checkpoint's config and whole tensors. Tensors
may be those of all layers or of some; other tensors pass through untouched. Arithmetic is in the tensors' own type:
give float32 where the weights will be rounded later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.attention_tensors import (
    HeadTensors,
    attention_prefixes,
    join_heads,
    pad_dims,
    scale_queries,
    split_heads,
)
from porting_kit.kernel_fit.note import FitNote
from porting_kit.kernel_fit.settings import (
    ALIBI_KINDS,
    Config,
    next_power_of_two,
    refuse_changed_rows,
    rotary_dims,
    set_rotary_dims,
)

Tensors = Mapping[str, torch.Tensor]
Fitted = tuple[dict[str, Any], dict[str, torch.Tensor], FitNote]


def change_layers(
    config: Config, tensors: Tensors, change: Callable[[str, HeadTensors], HeadTensors]
) -> dict[str, torch.Tensor]:
    """All tensors, those of each attention layer changed by `change(prefix, heads)`."""
    changed = dict(tensors)
    for prefix in attention_prefixes(tensors):
        changed |= join_heads(change(prefix, split_heads(config, tensors, prefix)), prefix)
    return changed


def pad_head_size(config: Config, tensors: Tensors, *, head_size: int) -> Fitted:
    """Add zero dims to every head, for a kernel of a larger head size.

    Queries are scaled because the kernel divides by the square root of the padded size. Rotary dims are the first dims
    of a head and stay what they are, so the rotated share becomes smaller.

    Args:
        head_size: the new D.

    Raises:
        ConversionError: not larger, ALiBi scaled by the head size, or queries and keys that are changed after the
            projection (clipped, normalised).
    """
    old = config["head_size"]
    if head_size <= old:
        raise ConversionError(
            "pad_head_size only makes heads larger",
            expected=f"a head size above {old}",
            found=str(head_size),
            next_step="remove it from the fit, or choose a larger size",
        )
    if config["position_embedding_type"] == "alibi_with_scale":
        raise ConversionError(
            "pad_head_size would change this model's ALiBi slopes",
            expected="positions that do not depend on the head size",
            found="alibi_with_scale: slopes are divided by the square root of the head size",
            next_step="fold_alibi enlarges the head itself",
        )
    refuse_changed_rows(config, "pad_head_size")
    factor = math.sqrt(head_size / old)
    padded = change_layers(config, tensors, lambda _, heads: scale_queries(pad_dims(heads, head_size), factor))
    fitted = {**config, "head_size": head_size}
    if config["position_embedding_type"].startswith("rope"):
        set_rotary_dims(fitted, rotary_dims(config))
    note = FitNote(
        "pad_head_size",
        True,
        f"heads of {old} dims are padded with zeros to {head_size}",
        {"head_size": [old, head_size], "query_factor": factor},
    )
    return fitted, padded, note


def pad_query_groups(config: Config, tensors: Tensors) -> Fitted:
    """Add zero query heads until each key/value head serves a power of two of them.

    Raises:
        ConversionError: groups already are powers of two, ALiBi (slopes follow the head count), or queries that are
            normalised after the projection.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    old, size = heads // kv_heads, config["head_size"]
    new = next_power_of_two(old)
    if new == old:
        raise ConversionError(
            "pad_query_groups has nothing to do",
            expected="query groups that are no power of two",
            found=f"{heads} query heads on {kv_heads} key/value heads, groups of {old}",
            next_step="remove it from the fit",
        )
    if config["position_embedding_type"] in ALIBI_KINDS:
        raise ConversionError(
            "pad_query_groups would change this model's ALiBi slopes, which follow the number of heads",
            expected="rotary positions",
            found=config["position_embedding_type"],
            next_step="put fold_alibi before it",
        )
    refuse_changed_rows(config, "pad_query_groups", clipping=False)

    def pad(_: str, tensors: HeadTensors) -> HeadTensors:
        def rows(tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
            if tensor is None:
                return None
            grouped = tensor.unflatten(dim, (kv_heads, old))
            shape = list(grouped.shape)
            shape[dim + 1] = new - old
            return torch.cat([grouped, grouped.new_zeros(shape)], dim + 1).flatten(dim, dim + 1)

        return replace(
            tensors,
            query=rows(tensors.query, 0),
            query_bias=rows(tensors.query_bias, 0),
            dense=rows(tensors.dense, 1),
        )

    fitted = {**config, "num_attention_heads": kv_heads * new, "head_size": size}
    note = FitNote(
        "pad_query_groups",
        True,
        f"query groups of {old} are padded with zero heads to {new}: {heads} query heads become {kv_heads * new}",
        {"query_heads": [heads, kv_heads * new], "group": [old, new]},
    )
    return fitted, change_layers(config, tensors, pad), note


def fold_scale(config: Config, tensors: Tensors, *, q_scaling: float | None = None) -> Fitted:
    """Multiply a query scaling into the query projection; the kernel then divides by the square root of D alone.

    Args:
        q_scaling: logits are divided by q_scaling * sqrt(D); the config's when None.

    Raises:
        ConversionError: no scaling to fold, or queries that are clipped or normalised after the projection.
    """
    scaling = float(config.get("q_scaling") or 1.0) if q_scaling is None else float(q_scaling)
    if scaling == 1.0 or scaling <= 0 or not math.isfinite(scaling):
        raise ConversionError(
            "fold_scale has nothing to fold",
            expected="a query scaling other than 1",
            found=f"q_scaling {scaling:g}",
            next_step="remove it from the fit",
        )
    refuse_changed_rows(config, "fold_scale")
    folded = change_layers(config, tensors, lambda _, heads: scale_queries(heads, 1.0 / scaling))
    note = FitNote(
        "fold_scale",
        True,
        f"query weights are divided by q_scaling {scaling:g}, which becomes 1",
        {"q_scaling": [scaling, 1.0]},
    )
    return {**config, "q_scaling": 1.0}, folded, note
