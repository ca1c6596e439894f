"""Make room in the heads of an ALiBi model: keep fewer dims of queries and keys than the head has.

Without rotation the product of queries and keys is the same in every basis, so each head may choose its own. The basis
taken here loses least of the product itself, judged by activations: with the second moment Sq of the queries and the
covariance Sk of the keys under attention, the best rank-r stand-in for the identity is the truncated singular value
decomposition of Sq^1/2 Sk^1/2, brought back by the inverse roots. The mean of the keys adds the same to every key's
logit, which softmax ignores, so it neither counts nor stays. Values keep all their dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.activations import HeadMoments
from porting_kit.kernel_fit.attention_tensors import HeadTensors
from porting_kit.kernel_fit.exact_transforms import Fitted, Tensors, change_layers
from porting_kit.kernel_fit.note import FitNote
from porting_kit.kernel_fit.settings import ALIBI_KINDS, refuse_changed_rows

LOGIT_BOUND_NATS = 0.35
"""Root mean square error of an attention logit, in the worst head, above which a truncation is refused."""
RIDGE = 1e-7
"""Added to the moments, relative to their mean diagonal, so that directions without activation can be inverted."""


@dataclass(frozen=True)
class HeadBasis:
    """How one key/value head's queries and keys are brought to fewer dims.

    Args:
        query, key: float64 [r, D]; new = matrix @ old.
        discarded_share: part of the logit's variance that is lost.
        logit_error_nats: root mean square of what is lost, in nats, over queries of the calibration and the keys they
            attend to, each by its attention.
    """

    query: torch.Tensor
    key: torch.Tensor
    discarded_share: float
    logit_error_nats: float


def choose_basis(query_moment: torch.Tensor, key_covariance: torch.Tensor, keep: int) -> HeadBasis:
    """The balanced basis of `keep` dims for one key/value head and the query heads that share it.

    Args:
        query_moment: mean of q q^T over the queries of all heads of the group, float64 [D, D].
        key_covariance: float64 [D, D].
    """
    size = query_moment.shape[0]
    root_query, inverse_query = _roots(query_moment)
    root_key, inverse_key = _roots(key_covariance)
    left, strength, right = torch.linalg.svd(root_query @ root_key)
    half = strength[:keep].sqrt()
    lost = float((strength[keep:] ** 2).sum())
    whole = float((strength**2).sum())
    return HeadBasis(
        query=half[:, None] * (left[:, :keep].T @ inverse_query),
        key=half[:, None] * (right[:keep] @ inverse_key),
        discarded_share=lost / whole if whole else 0.0,
        logit_error_nats=math.sqrt(lost / size),
    )


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square root of a symmetric positive matrix, and the root's inverse."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp_min(0) + RIDGE * float(values.clamp_min(0).mean()) + 1e-30
    root = values.sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def truncate_heads(
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    keep: int,
    activations: Mapping[str, HeadMoments],
    bound_nats: float = LOGIT_BOUND_NATS,
) -> Fitted:
    """Keep `keep` dims of every head's queries and keys; the rest become zeros behind them.

    Args:
        keep: dims to keep, below D.
        activations: layer prefix -> moments, from `measure_activations` on the unfitted model.
        bound_nats: see LOGIT_BOUND_NATS.

    Raises:
        ConversionError: rotated or clipped queries, no activations for a layer, or a loss above the bound.
    """
    size, kv_heads = config["head_size"], config["num_key_value_heads"]
    if config["position_embedding_type"] not in ALIBI_KINDS:
        raise ConversionError(
            "truncate_heads needs queries and keys that no rotation touches",
            expected="alibi or alibi_with_scale",
            found=str(config["position_embedding_type"]),
            next_step="remove it from the fit",
        )
    if not 0 < keep < size:
        raise ConversionError(
            "truncate_heads keeps a part of each head",
            expected=f"1 to {size - 1}",
            found=str(keep),
            next_step="choose a number within this range",
        )
    refuse_changed_rows(config, "truncate_heads")
    shares: list[float] = []
    errors: list[float] = []

    def truncate(prefix: str, heads: HeadTensors) -> HeadTensors:
        if prefix not in activations:
            raise ConversionError(
                f"truncate_heads has no activations of {prefix}attention",
                expected="moments of every layer, measured on the unfitted model",
                items=sorted(activations),
                next_step="measure them with measure_activations",
            )
        moments = activations[prefix]
        grouped = moments.query.unflatten(0, (kv_heads, -1)).sum(1)
        bases = [choose_basis(grouped[k], moments.key[k], keep) for k in range(kv_heads)]
        group = heads.query.shape[0] // kv_heads
        shares.extend(basis.discarded_share for basis in bases)
        # The group's moment is a sum over its query heads; the error is that of one of them on average.
        errors.extend(basis.logit_error_nats / math.sqrt(group) for basis in bases)
        return _change_basis(heads, bases, moments)

    truncated = change_layers(config, tensors, truncate)
    worst = max(errors, default=0.0)
    if worst > bound_nats:
        raise ConversionError(
            f"truncate_heads would lose too much: head size {size} to {keep} dims",
            expected=f"a root mean square error of the attention logit of at most {bound_nats:g} nats in every head",
            found=f"{worst:.3g} nats in the worst head, {max(shares):.2%} of its logits' variance",
            next_step="keep more dims; the model's heads use nearly all of theirs",
        )
    figures = {
        "kept_dims": keep,
        "head_size": size,
        "discarded_share_mean": sum(shares) / len(shares) if shares else 0.0,
        "discarded_share_worst": max(shares, default=0.0),
        "logit_error_nats_mean": sum(errors) / len(errors) if errors else 0.0,
        "logit_error_nats_worst": worst,
    }
    what = f"{keep} of {size} dims of queries and keys are kept, in the basis that loses least of their product"
    return dict(config), truncated, FitNote("truncate_heads", False, what, figures)


def _change_basis(heads: HeadTensors, bases: Sequence[HeadBasis], moments: HeadMoments) -> HeadTensors:
    size, keep = heads.query.shape[1], bases[0].query.shape[0]
    group = heads.query.shape[0] // len(bases)
    query_map = torch.zeros(len(bases), size, size, dtype=torch.float64)
    key_map = torch.zeros_like(query_map)
    query_map[:, :keep] = torch.stack([basis.query for basis in bases])
    key_map[:, :keep] = torch.stack([basis.key for basis in bases])
    per_query = query_map.repeat_interleave(group, 0)
    dtype = heads.query.dtype
    heads = heads.with_bias()
    centred = heads.key_bias.double() - moments.key_mean
    return replace(
        heads,
        query=(per_query @ heads.query.double()).to(dtype),
        key=(key_map @ heads.key.double()).to(dtype),
        query_bias=(per_query @ heads.query_bias.double()[:, :, None])[:, :, 0].to(dtype),
        key_bias=(key_map @ centred[:, :, None])[:, :, 0].to(dtype),
    )
