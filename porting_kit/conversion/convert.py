"""The conversion as a pipeline: read settings, plan, stream every value once, prove it by the way back.

`convert_checkpoint` writes a folder, `checkpoint_tensors` keeps everything in memory. Both return where each tensor
and each config field came from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.architectures.release_needs import require_release
from porting_kit.conversion.base_checkpoint import (
    is_base_checkpoint,
    join_config,
    open_base_checkpoint,
    plan_joining,
)
from porting_kit.conversion.config_fields import FieldRow, build_config
from porting_kit.conversion.estimate import require_room
from porting_kit.conversion.heads import HeadSet, read_head_set
from porting_kit.conversion.journal import describe_conversion
from porting_kit.conversion.output_folder import CONFIG, RECEIPT, OutputFolder, open_output
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
from porting_kit.conversion.source_digests import SourceDigests
from porting_kit.conversion.tensor_source import TensorSource, open_tensor_source
from porting_kit.conversion.warnings import list_warnings
from porting_kit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from porting_kit.conversion.stream import ShowProgress


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
    workers: int | None = None,
    progress: ShowProgress | None = None,
    documents: Mapping[str, Any] | None = None,
) -> ConversionOutcome:
    """Convert a base, and Medusa heads if given, into a TensorRT-LLM checkpoint.

    An interrupted conversion of the same sources into the same folder is continued. The bytes written do not depend
    on `workers`.

    Args:
        base_folder: a Hugging Face folder or a GGUF file.
        out_folder: created; a checkpoint already there is replaced when the new one is complete.
        heads: a HeadSet, or what `read_head_set` takes.
        dtype: float16, bfloat16 or float32; None takes the base's own (float16 for a float32 base).
        tp_size, pp_size: ranks.
        max_draft_len: draft tokens of the largest tree (63 when None).
        release: TensorRT-LLM release the checkpoint is for; what it cannot express is refused.
        verify: read each tensor back from the file and compare it with the source through the inverse rules.
        fit: changes the attention on its way (`FitPlan.for_conversion`); None leaves the model as it is. A fitted
            conversion is not continued after an interruption but started again.
        workers: threads; one a core, at most four, when None.
        progress: called a few times a second.
        documents: file name -> JSON document to write beside the receipt.

    Raises:
        BaseModelError, HeadsError, ConversionError: see `plan_conversion`; also a source that changes while it is read.
            Nothing is left behind.
        CheckpointError: the output folder is in use or cannot be written, or the disk is full. What was written stays
            for the next run, under names that no reader takes for a checkpoint.
    """
    started = time.perf_counter()
    if is_base_checkpoint(Path(base_folder)):
        raise CheckpointError(
            "the base is a TensorRT-LLM checkpoint, not a Hugging Face model",
            expected="a Hugging Face model",
            found="a TensorRT-LLM checkpoint",
            where=base_folder,
            next_step="name it as base_checkpoint, which adds the heads to it; base stays the Hugging Face model",
        )
    base, source, heads = _open_inputs(base_folder, heads)
    dtype = dtype or choose_dtype(base)
    require_release(base, release, tp_size)
    options = {"dtype": dtype, "heads": heads, "release": release, "tp_size": tp_size, "pp_size": pp_size}
    plan, config, table = _plan_with_config(base, source, max_draft_len, options)
    if fit is not None:
        plan = fit.refit_plan(plan, config)
    return write_checkpoint(
        plan,
        source,
        heads,
        config,
        table,
        Path(out_folder),
        verify=verify,
        fit=fit,
        workers=workers,
        progress=progress,
        documents=documents,
        started=started,
    )


def add_heads(
    base_checkpoint: str | Path,
    out_folder: str | Path,
    heads: HeadSet | str | Path,
    *,
    max_draft_len: int | None = None,
    release: str | None = None,
    verify: bool = True,
    workers: int | None = None,
    progress: ShowProgress | None = None,
    documents: Mapping[str, Any] | None = None,
) -> ConversionOutcome:
    """Copy a TensorRT-LLM checkpoint of the base and add Medusa heads, for the same ranks and in the same dtype.

    Args:
        base_checkpoint: config.json and rank*.safetensors, by upstream's converter or any other.
        rest: as for `convert_checkpoint`.

    Raises:
        CheckpointError: see `open_base_checkpoint`. HeadsError: the heads do not fit it.
    """
    started = time.perf_counter()
    base, source = open_base_checkpoint(Path(base_checkpoint))
    heads = heads if isinstance(heads, HeadSet) else read_head_set(heads)
    config, table = join_config(base, heads, max_draft_len, release)
    return write_checkpoint(
        plan_joining(base, source, heads),
        source,
        heads,
        config,
        table,
        Path(out_folder),
        verify=verify,
        workers=workers,
        progress=progress,
        documents=documents,
        started=started,
    )


def write_checkpoint(
    plan: ConversionPlan,
    source: TensorSource,
    heads: HeadSet | None,
    config: dict[str, Any],
    table: tuple[FieldRow, ...],
    out_folder: Path,
    *,
    verify: bool,
    fit: TargetFit | None = None,
    workers: int | None = None,
    progress: ShowProgress | None = None,
    documents: Mapping[str, Any] | None = None,
    started: float | None = None,
) -> ConversionOutcome:
    """Carry out a plan. Arguments and errors as for `convert_checkpoint`.

    Args:
        config, table: config.json and where its fields came from.
        started: `time.perf_counter()` when the work began; now when None.
    """
    started = time.perf_counter() if started is None else started
    _refuse_source_folder(out_folder, source, heads)
    keep_earlier = require_room(plan, out_folder)
    sources = [source, *([heads.source] if heads is not None else [])]
    description = describe_conversion(plan, sources, config)
    if fit is not None:
        description["fit"] = uuid.uuid4().hex  # equal to no other: a fit looks at all of a layer again
    ranks = [plan.rank_tensors(rank) for rank in range(plan.world_size)]
    with (
        open_output(out_folder, ranks, description, keep_earlier=keep_earlier) as output,
        SourceDigests(sources) as digests,
    ):
        warnings = list_warnings(plan, source, heads)
        if output.dropped:
            warnings += ("the disk has no room for two checkpoints: the one that was there was removed first",)
        if output.note:
            warnings += (f"an interrupted conversion was started again: {output.note}",)
        streamed = plan if fit is None else replace(plan, tensors=tuple(t for t in plan.tensors if not fit.looks_at(t)))
        verified = _stream_values(streamed, source, heads, output, workers, progress, verify)
        if fit is not None:
            verified += _write_fitted(_iterate_fitted(source, heads, fit), plan, output, verify)
            config, table = fit.finish_config(config, table)
        source_files = digests.collect()
        for one in sources:
            for file in one.files():
                one.check_unchanged(file)
        outcome = ConversionOutcome(
            config=config,
            field_table=table,
            sources=list_source_fates(plan, source, heads),
            targets=tuple(describe_target(planned) for planned in plan.tensors),
            files=(*(file.path for file in output.ranks), out_folder / CONFIG),
            warnings=warnings,
            verified=verified,
            seconds=time.perf_counter() - started,
            source_files=source_files,
            rules=plan.rules_digest,
            resumed_spans=len(output.done),
        )
        output.finish(config, {**(documents or {}), RECEIPT: outcome.receipt()})
    return outcome


def checkpoint_tensors(
    base_folder: str | Path,
    heads: HeadSet | str | Path | None = None,
    dtype: str | None = None,
    max_draft_len: int | None = None,
    release: str | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and tensors of a one-rank checkpoint, in memory. Arguments as for `convert_checkpoint`."""
    config, (tensors,) = checkpoint_ranks(base_folder, heads, dtype, max_draft_len, release)
    return config, tensors


def checkpoint_ranks(
    base_folder: str | Path,
    heads: HeadSet | str | Path | None = None,
    dtype: str | None = None,
    max_draft_len: int | None = None,
    release: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """The config and each rank's tensors, in memory. Arguments as for `convert_checkpoint`."""
    from porting_kit.conversion.apply import cut_piece

    base, source, heads = _open_inputs(base_folder, heads)
    dtype = dtype or choose_dtype(base)
    require_release(base, release, tp_size)
    options = {"dtype": dtype, "heads": heads, "release": release, "tp_size": tp_size, "pp_size": pp_size}
    plan, config, _ = _plan_with_config(base, source, max_draft_len, options)
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(plan.world_size)]
    for planned, _, whole in iterate_targets(plan, source, heads):
        for piece in planned.pieces:
            part = cut_piece(whole, planned, piece)
            # clone: a part may be a view of the whole, which would stay in memory with it
            ranks[piece.rank][piece.name] = part.clone() if part._base is not None else part
    return config, ranks


def _plan_with_config(
    base: BaseConfig, source: TensorSource, max_draft_len: int | None, options: dict[str, Any]
) -> tuple[ConversionPlan, dict[str, Any], Sequence[FieldRow]]:
    """The plan, its config.json and where each field came from, for one set of options."""
    plan = plan_conversion(base, source, **options)
    return plan, *build_config(plan.base, max_draft_len=max_draft_len, **options)


def choose_dtype(base: BaseConfig) -> str:
    """The base's own dtype; float16 when it is float32 or not stated, as TensorRT-LLM's converters do."""
    return base.dtype if base.dtype in ("float16", "bfloat16") else "float16"


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
        yield planned, sources, build_target(planned, sources, plan.dims_of(planned), scalars)


def _iterate_fitted(
    source: TensorSource, heads: HeadSet | None, fit: TargetFit
) -> Iterator[tuple[PlannedTensor, list[torch.Tensor], torch.Tensor]]:
    """The targets that a fit looks at, fitted; a layer's attention is in memory at a time."""
    plan = fit.unfitted_plan
    attention = replace(plan, tensors=tuple(planned for planned in plan.tensors if fit.looks_at(planned)))
    yield from fit.refit_targets(iterate_targets(attention, source, heads))


def _open_inputs(
    base_folder: str | Path, heads: HeadSet | str | Path | None
) -> tuple[BaseConfig, TensorSource, HeadSet | None]:
    source = open_tensor_source(base_folder)
    base = read_base_config(base_folder, source.names())
    if heads is not None and not isinstance(heads, HeadSet):
        heads = read_head_set(heads)
    return base, source, heads


def _refuse_source_folder(out_folder: Path, source: TensorSource, heads: HeadSet | None) -> None:
    inputs = [source.where] + ([heads.where] if heads is not None else [])
    folders = {(path if path.is_dir() else path.parent).resolve() for path in inputs}
    if out_folder.resolve() in folders:
        raise CheckpointError(
            "the checkpoint would be written into one of its own inputs",
            expected="a folder that is neither base nor heads",
            found="one of the two",
            where=out_folder,
            next_step="name another output folder",
        )


def _stream_values(
    plan: ConversionPlan,
    source: TensorSource,
    heads: HeadSet | None,
    output: OutputFolder,
    workers: int | None,
    progress: ShowProgress | None,
    verify: bool,
) -> int:
    """One pass over the sources, into every rank's file. Returns how many targets were proved by the way back."""
    from porting_kit.conversion.proof import prove_targets
    from porting_kit.conversion.spans import SpanMaker
    from porting_kit.conversion.stream import default_workers, run_spans

    workers = workers or default_workers()
    maker = SpanMaker(plan, source, heads)
    run_spans(maker, maker.cut(), output.ranks, output.journal, output.done, workers=workers, progress=progress)
    if not verify:
        return 0
    proof = prove_targets(plan, source, heads, [file.read_back for file in output.ranks], workers)
    proof.require()
    return proof.proved


def _write_fitted(
    targets: Iterator[tuple[PlannedTensor, list[torch.Tensor], torch.Tensor]],
    plan: ConversionPlan,
    output: OutputFolder,
    verify: bool,
) -> int:
    """One pass over the targets that a fit looks at: whole, because it looks at a layer's attention together."""
    from porting_kit.conversion.apply import cut_piece, join_pieces
    from porting_kit.conversion.inverse import verify_fitted, verify_target

    count = 0
    for planned, sources, whole in targets:
        count += 1
        for piece in planned.pieces:
            output.ranks[piece.rank].write(piece.name, cut_piece(whole, planned, piece))
        if verify:
            parts = [output.ranks[piece.rank].read_back(piece.name) for piece in planned.pieces]
            if planned.origin == FITTED_ORIGIN:
                verify_fitted(planned, join_pieces(planned, parts), whole)
            else:
                verify_target(planned, join_pieces(planned, parts), sources, plan)
    return count if verify else 0
