"""The conversion as a pipeline: read settings, plan, write each tensor in one pass, prove it by the way back.

`convert_checkpoint` writes a folder, `checkpoint_tensors` keeps everything in memory. Both return where each tensor
and each config field came from.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.conversion.checkpoint import RankFile, write_config
from porting_kit.conversion.config_fields import build_config
from porting_kit.conversion.heads import HeadSet, read_head_set
from porting_kit.conversion.plan import plan_conversion
from porting_kit.conversion.planned import (
    FITTED_ORIGIN,
    ConversionPlan,
    PlannedTensor,
    TargetFit,
    plan_scalars,
    read_source,
)
from porting_kit.conversion.receipt import ConversionOutcome, describe_target, list_source_fates
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def convert_checkpoint(
    base_folder: str | Path,
    out_folder: str | Path,
    *,
    heads: HeadSet | str | Path | None = None,
    dtype: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    max_draft_len: int | None = None,
    release: str | None = None,
    verify: bool = True,
    fit: TargetFit | None = None,
) -> ConversionOutcome:
    """Convert a base, and Medusa heads if given, into a TensorRT-LLM checkpoint.

    Args:
        base_folder: a Hugging Face folder or a GGUF file.
        out_folder: created; a checkpoint already there is replaced.
        heads: a HeadSet, or what `read_head_set` takes.
        dtype: float16, bfloat16 or float32; None takes the base's own (float16 for a float32 base).
        tp_size, pp_size: ranks.
        max_draft_len: draft tokens of the largest tree (63 when None).
        release: TensorRT-LLM release the checkpoint is for; what it cannot express is refused.
        verify: read each tensor back from the file and compare it with the source through the inverse rules.
        fit: changes the attention on its way (`FitPlan.for_conversion`); None leaves the model as it is.

    Raises:
        BaseModelError, HeadsError, ConversionError, CheckpointError: see `plan_conversion`; nothing is left behind.
    """
    started = time.perf_counter()
    base, source, heads = _open_inputs(base_folder, heads)
    dtype = dtype or choose_dtype(base)
    require_release(base, release)
    plan = plan_conversion(base, source, tp_size=tp_size, pp_size=pp_size, dtype=dtype, heads=heads, release=release)
    config, table = build_config(
        plan.base,
        dtype=dtype,
        tp_size=tp_size,
        pp_size=pp_size,
        heads=heads,
        max_draft_len=max_draft_len,
        release=release,
    )
    if fit is not None:
        plan = fit.refit_plan(plan, config)
    out_folder = Path(out_folder)
    _refuse_source_folder(out_folder, source, heads)
    existed = out_folder.exists()
    out_folder.mkdir(parents=True, exist_ok=True)
    ranks: list[RankFile] = []
    try:
        _remove_old_checkpoint(out_folder)
        for rank in range(plan.world_size):
            ranks.append(RankFile(out_folder / f"rank{rank}.safetensors", plan.rank_tensors(rank)))
        verified = _write_values(iterate_targets(plan, source, heads, fit), plan, ranks, verify)
        for file in ranks:
            file.commit()
        if fit is not None:
            config, table = fit.finish_config(config, table)
        config_file = write_config(out_folder, config)
    except BaseException:
        for file in ranks:
            file.discard()
        if not existed:
            shutil.rmtree(out_folder, ignore_errors=True)
        else:
            _remove_old_checkpoint(out_folder)
        raise
    return ConversionOutcome(
        config=config,
        field_table=table,
        sources=list_source_fates(plan, source, heads),
        targets=tuple(describe_target(planned) for planned in plan.tensors),
        files=(*(file.path for file in ranks), config_file),
        warnings=tuple(_plan_warnings(plan, source, heads)) + tuple(_tied_warning(plan, source)),
        verified=verified,
        seconds=time.perf_counter() - started,
    )


def checkpoint_tensors(
    base_folder: str | Path,
    heads: HeadSet | str | Path | None = None,
    dtype: str | None = None,
    max_draft_len: int | None = None,
    release: str | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and tensors of a one-rank checkpoint, in memory. Arguments as for `convert_checkpoint`."""
    base, source, heads = _open_inputs(base_folder, heads)
    dtype = dtype or choose_dtype(base)
    require_release(base, release)
    plan = plan_conversion(base, source, dtype=dtype, heads=heads, release=release)
    config, _ = build_config(plan.base, dtype=dtype, heads=heads, max_draft_len=max_draft_len, release=release)
    tensors = {}
    for planned, _, whole in iterate_targets(plan, source, heads):
        # clone: an uncast tensor may be a view of the mapped source file
        tensors[planned.target] = whole.clone() if whole._base is not None or not whole.is_contiguous() else whole
    return config, tensors


def choose_dtype(base: BaseConfig) -> str:
    """The base's own dtype; float16 when it is float32 or not stated, as TensorRT-LLM's converters do."""
    return base.dtype if base.dtype in ("float16", "bfloat16") else "float16"


def require_release(base: BaseConfig, release: str | None, tp_size: int = 1) -> None:
    """Raise BaseModelError when a TensorRT-LLM release cannot express this base; None asks nothing."""
    from porting_kit.architectures.release_needs import find_unmet_needs
    from porting_kit.architectures.releases import release_key
    from porting_kit.errors import BaseModelError

    unmet = find_unmet_needs(base, release, tp_size)
    since = [need.since for need in unmet]
    if unmet:
        raise BaseModelError(
            f"TensorRT-LLM {release} cannot express this model: {unmet[0].what}",
            expected=f"{unmet[0].since} or later" if unmet[0].since else "no release takes this",
            found=release,
            where=base.where,
            items=[need.what for need in unmet[1:]],
            next_step=f"use TensorRT-LLM {max(since, key=release_key)} or later" if all(since) else None,
        )


def iterate_targets(
    plan: ConversionPlan, source: TensorSource, heads: HeadSet | None, fit: TargetFit | None = None
) -> Iterator[tuple[PlannedTensor, list[torch.Tensor], torch.Tensor]]:
    """Every target with its sources, whole and in the checkpoint's dtype, one at a time."""
    if fit is not None:
        yield from fit.refit_targets(iterate_targets(fit.unfitted_plan, source, heads))
        return
    from porting_kit.conversion.apply import build_target

    scalars = plan_scalars(plan)
    for planned in plan.tensors:
        sources = [read_source(planned, name, source, heads) for name in planned.sources]
        yield planned, sources, build_target(planned, sources, plan.dims, scalars)


def _open_inputs(
    base_folder: str | Path, heads: HeadSet | str | Path | None
) -> tuple[BaseConfig, TensorSource, HeadSet | None]:
    base = read_base_config(base_folder)
    source = open_tensor_source(base_folder)
    if heads is not None and not isinstance(heads, HeadSet):
        heads = read_head_set(heads)
    return base, source, heads


def _refuse_source_folder(out_folder: Path, source: TensorSource, heads: HeadSet | None) -> None:
    inputs = [source.where] + ([heads.where] if heads is not None else [])
    folders = {(path if path.is_dir() else path.parent).resolve() for path in inputs}
    if out_folder.resolve() in folders:
        raise CheckpointError(
            "the checkpoint would be written into one of its own inputs",
            where=out_folder,
            next_step="name another output folder",
        )


def _remove_old_checkpoint(folder: Path) -> None:
    """Remove what an earlier conversion left: config.json first, so that no half checkpoint looks whole."""
    (folder / "config.json").unlink(missing_ok=True)
    for file in (*folder.glob("rank*.safetensors"), *folder.glob(".*.partial")):
        file.unlink()


def _write_values(
    targets: Iterator[tuple[PlannedTensor, list[torch.Tensor], torch.Tensor]],
    plan: ConversionPlan,
    ranks: list[RankFile],
    verify: bool,
) -> int:
    """One pass over all targets, into every rank's file. Returns how many were proved by the way back."""
    from porting_kit.conversion.apply import cut_piece, join_pieces
    from porting_kit.conversion.inverse import verify_fitted, verify_target

    for planned, sources, whole in targets:
        for piece in planned.pieces:
            ranks[piece.rank].write(piece.name, cut_piece(whole, planned, piece))
        if verify:
            parts = [ranks[piece.rank].read_back(piece.name) for piece in planned.pieces]
            if planned.origin == FITTED_ORIGIN:
                verify_fitted(planned, join_pieces(planned, parts), whole)
            else:
                verify_target(planned, join_pieces(planned, parts), sources, plan)
    return len(plan.tensors) if verify else 0


def _tied_warning(plan: ConversionPlan, source: TensorSource) -> Iterator[str]:
    import torch

    if not plan.base.tied:
        return
    for planned in plan.tensors:
        if planned.target == "lm_head.weight" and planned.origin == "base":
            (embedding,) = [t.sources[0] for t in plan.tensors if t.target == "transformer.vocab_embedding.weight"]
            own = source.read(planned.sources[0])
            if not torch.equal(own, source.read(embedding)):
                yield (
                    f"the config ties the output matrix to the embedding, but {planned.sources[0]} differs from it; "
                    "the file's own matrix is used"
                )


def _plan_warnings(plan: ConversionPlan, source: TensorSource, heads: HeadSet | None) -> list[str]:
    warnings = [*heads.warnings, *heads.compare_base(plan.base)] if heads is not None else []
    dtypes = {source.dtype(name) for planned in plan.tensors if planned.origin != "heads" for name in planned.sources}
    if plan.dtype == "float16" and dtypes & {"bfloat16", "float32"}:
        names = ", ".join(sorted(dtypes & {"bfloat16", "float32"}))
        warnings.append(f"{names} weights are written as float16: no value overflows, small ones may lose digits")
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
