"""The base checkpoint that heads are added to, held against what the port says of its base. Reads headers only.

What the port would have converted is planned, and the checkpoint compared with it: fields of the config, names, shapes
and dtypes of all ranks. A field that is left out counts as what the release takes for it. Whether the values are the
base's own is proved by `convert --verify`, by the same plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from porting_kit.architectures.base_config import BaseConfig
from porting_kit.architectures.rules import VOCABULARY, Shard
from porting_kit.config_defaults import read_config_defaults
from porting_kit.conversion.base_checkpoint import CheckpointBase, open_base_checkpoint
from porting_kit.conversion.config_fields import build_config
from porting_kit.conversion.plan import EMBEDDING, plan_conversion
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor
from porting_kit.conversion.quantised_config import compare_config, list_unjudged_fields
from porting_kit.conversion.quantised_files import read_quantised
from porting_kit.conversion.sharding import cut_pieces
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.conversion.unquantised import compare_headers
from porting_kit.errors import CheckpointError
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.port import Port
from porting_kit.source_tree import SourceTree


def open_joined_base(
    port: Port,
    base: BaseConfig,
    base_source: TensorSource,
    fit: FitPlan | None,
    release: str | None,
    source_tree: SourceTree,
) -> tuple[CheckpointBase, TensorSource]:
    """The port's base checkpoint, when it is what the port would have converted.

    Args:
        port: names the base checkpoint.
        base: the Hugging Face base.
        base_source: its tensors.
        fit: the port's kernel fit; None for none.
        release: that the checkpoint is for; None where the port names none.
        source_tree: the port's, whose classes say what an absent field counts as.

    Raises:
        CheckpointError: it cannot be used; is of another base, dtype or ranks; states other fields, or holds other
            tensors than the base's; or the port needs a kernel fit.
    """
    joined, source = open_base_checkpoint(port.base_checkpoint_path)
    wanted = (
        base.architecture,
        base.hidden_size,
        base.vocab_size,
        port.dtype,
        port.target.tp_size,
        port.target.pp_size,
    )
    found = (joined.architecture, joined.hidden_size, joined.vocab_size, joined.dtype, *joined.ranks)
    if wanted != found:
        names = ("architecture", "hidden size", "vocabulary", "dtype", "tp_size", "pp_size")
        unlike = [name for name, one, two in zip(names, wanted, found, strict=True) if one != two]
        raise CheckpointError(
            f"the base checkpoint is of another {' and '.join(unlike)} than the port",
            expected=", ".join(map(str, wanted)),
            found=", ".join(map(str, found)),
            where=joined.where,
            next_step="correct the port file, or convert the base again",
        )
    if fit is not None and fit.steps:
        raise CheckpointError(
            "a kernel fit changes the base's attention, so the base must be converted here",
            expected="fit: off, or no base_checkpoint",
            found=f"fit: {fit}",
            where=joined.where,
            next_step="set fit: off, or leave base_checkpoint out",
        )
    _require_same_model(port, plan_base(port, base, base_source, release), source_tree)
    return joined, source


def plan_base(port: Port, base: BaseConfig, base_source: TensorSource, release: str | None) -> ConversionPlan:
    """What the port would have converted, without heads. Raises as `plan_conversion` does."""
    target = port.target
    return plan_conversion(
        base, base_source, dtype=port.dtype, release=release, tp_size=target.tp_size, pp_size=target.pp_size
    )


def warn_of_unjudged_fields(joined: CheckpointBase, plan: ConversionPlan, source_tree: SourceTree) -> tuple[str, ...]:
    """A warning where the checkpoint leaves out fields of the base of which neither table nor release says a default.

    Args:
        joined: from `open_joined_base`.
        plan: from `plan_base`.
        source_tree: the port's.
    """
    fields = list_unjudged_fields(joined.raw, _convert_config(plan), _read_defaults(plan, source_tree))
    if not fields:
        return ()
    return (f"the base checkpoint leaves out {', '.join(fields)}, and no default is known: not judged",)


def _require_same_model(port: Port, plan: ConversionPlan, source_tree: SourceTree) -> None:
    folder = port.base_checkpoint_path
    checkpoint = read_quantised(folder)
    release = _read_defaults(plan, source_tree)
    faults = (
        *compare_config(checkpoint.config, _convert_config(plan), plan.base, release),
        *compare_headers(checkpoint, plan),
    )
    if faults:
        raise CheckpointError(
            f"the base checkpoint is not what the port's base converts to: {faults[0].text}",
            expected="config and tensors of the port's base",
            found=f"{len(faults)} differences",
            where=folder,
            items=[f"{fault.module}: {fault.kind}" for fault in faults],
            next_step="convert the base again, or name the base that this checkpoint was made of",
        )


def _convert_config(plan: ConversionPlan) -> dict[str, Any]:
    return build_config(plan.base, dtype=plan.dtype, tp_size=plan.tp_size, pp_size=plan.pp_size)[0]


def _read_defaults(plan: ConversionPlan, source_tree: SourceTree) -> dict[str, Any]:
    """What the tree's class of the base takes for absent fields; nothing where the tree has no such class."""
    name = plan.base.architecture
    return read_config_defaults(source_tree, name) if name in source_tree.model_names() else {}


def follow_embedding(plan: ConversionPlan, base: CheckpointBase) -> ConversionPlan:
    """A base's plan with the embedding cut as a checkpoint's config says: some converters cut it over the ranks."""
    if plan.tp_size == 1 or not base.raw.get("use_parallel_embedding"):
        return plan
    shard = VOCABULARY if base.raw.get("embedding_sharding_dim", 0) == 0 else Shard(1)
    tensors = [_cut_again(one, shard, plan) if one.target == EMBEDDING else one for one in plan.tensors]
    return replace(plan, tensors=tuple(tensors))


def _cut_again(planned: PlannedTensor, shard: Shard, plan: ConversionPlan) -> PlannedTensor:
    whole = planned.shape[0] - planned.padded_rows
    rows = plan.padded_vocab_size if shard.vocabulary else whole
    shape, piece = (rows, *planned.shape[1:]), planned.pieces[0]
    pieces = cut_pieces(piece.name, piece.rank // plan.tp_size, shape, shard, plan.dims, plan.tp_size)
    return replace(planned, shape=shape, shard=shard, pieces=pieces, padded_rows=rows - whole)
