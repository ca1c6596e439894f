"""The quantised step: a quantised checkpoint against itself and its base, its 16-bit twin, and heads added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.config_defaults import read_config_defaults
from porting_kit.conversion.config_fields import MAX_DRAFT_TOKENS, require_draft_limit
from porting_kit.conversion.dequantised import require_quantised, write_dequantised
from porting_kit.conversion.quantised import (
    CALIBRATION_SAMPLES,
    QuantisedFault,
    count_unproven_scales,
    find_faults,
)
from porting_kit.conversion.quantised_base import convert_base
from porting_kit.conversion.quantised_comparison import BaseComparison, WeightError, compare_base
from porting_kit.conversion.quantised_config import STRUCTURE
from porting_kit.conversion.quantised_files import QuantisedCheckpoint, read_quantised
from porting_kit.conversion.quantised_heads import add_heads
from porting_kit.errors import CheckpointError, RunFolderError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.source_tree import open_source_tree
from porting_kit.steps.context import Stopwatch
from porting_kit.whole_files import require_free


@dataclass(frozen=True)
class QuantisedResult:
    """What was found, and what was written.

    Args:
        outcome: the verdict.
        faults: contradictions between config, weights, heads and exclude list.
        compared: what the comparison with the base found; empty when no base was given.
    """

    outcome: StepOutcome
    faults: tuple[QuantisedFault, ...]
    compared: BaseComparison

    @property
    def errors(self) -> tuple[WeightError, ...]:
        """Each quantised matrix against the base's."""
        return self.compared.errors

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            **self.outcome.as_dict(),
            "faults": [vars(fault) for fault in self.faults],
            "differences": [vars(difference) for difference in self.compared.differences],
            "weight_errors": [{**vars(error), "passed": error.passed} for error in self.errors],
        }


def check_quantised(
    checkpoint: Path,
    *,
    base: Path | None = None,
    source: str | None = None,
    heads: Path | None = None,
    dequantised: Path | None = None,
    out: Path | None = None,
    max_draft_len: int | None = None,
) -> QuantisedResult:
    """Check a quantised checkpoint, and write what was asked for when it is sound.

    Args:
        checkpoint: its folder.
        base: the Hugging Face base, to compare config and every tensor with.
        source: the TensorRT-LLM tree that says what is taken for fields that the config leaves out; the bundled
            definitions when None.
        heads: Medusa heads: with `out` to add in 16 bit, without it those that the checkpoint holds, to compare with.
        dequantised: where the 16-bit twin goes, for the emulator.
        out: where the checkpoint with heads goes.
        max_draft_len: draft tokens of the largest tree; 63 when None.

    Raises:
        CheckpointError: files that cannot be read, a checkpoint that is not quantised, heads that do not fit or are
            none to compare with, or weights interleaved for a card and no base to tell for which.
        ConversionError: a draft limit that no engine can verify; a base that cannot be converted.
        HeadsError: unusable heads.
        SourceTreeError: `source` is no tree, or has no class for the checkpoint.
        RunFolderError: a folder to write into is occupied, or both are one.
    """
    _require_options(base, source, heads, out, max_draft_len)
    _require_places(out, dequantised)
    watch = Stopwatch()
    read = read_quantised(checkpoint)
    faults = find_faults(read)
    compared = BaseComparison()
    head_set = None
    if heads is not None:
        from porting_kit.conversion.heads import read_head_set

        head_set = read_head_set(heads)
        if out is None:
            _require_heads(read)
    if not faults and base is not None:
        require_quantised(read)
        release = _read_defaults(read, source)
        compared = compare_base(read, convert_base(read, base, head_set if out is None else None), release)
    written: list[str] = []
    if not faults and compared.passed:
        if dequantised is not None:
            written.append(str(write_dequantised(checkpoint, dequantised, layout=compared.layout)))
        if head_set is not None and out is not None:
            limit = MAX_DRAFT_TOKENS if max_draft_len is None else max_draft_len
            written.append(str(add_heads(checkpoint, head_set, out, max_draft_len=limit)))
    return QuantisedResult(_judge(read, faults, compared, written, watch), faults, compared)


def _require_options(
    base: Path | None, source: str | None, heads: Path | None, out: Path | None, max_draft_len: int | None
) -> None:
    """Refuse options that would do nothing, and a draft limit that no engine can verify."""
    if source is not None and base is None:
        raise CheckpointError(
            "a source tree is asked for fields that are compared with a base",
            expected="--base beside --source",
            found=source,
            next_step="name the Hugging Face base with --base, or leave --source out",
        )
    if out is not None and heads is None:
        raise CheckpointError(
            "there are no heads to add",
            expected="--heads beside --out",
            found=out,
            next_step="name the heads with --heads, or leave --out out",
        )
    if heads is not None and out is None and base is None:
        raise CheckpointError(
            "heads are either added or compared",
            expected="--out for a folder that takes the checkpoint with heads, or --base to compare with",
            found=heads,
            next_step="add --out or --base",
        )
    if max_draft_len is not None:
        if out is None:
            raise CheckpointError(
                "a draft limit is written beside heads",
                expected="--out",
                found=max_draft_len,
                next_step="add --out and --heads, or leave --max-draft-len out",
            )
        require_draft_limit(max_draft_len)


def _read_defaults(read: QuantisedCheckpoint, source: str | None) -> dict[str, Any]:
    """What the tree's class of the checkpoint takes for absent fields; nothing where the bundled tree has none."""
    tree, architecture = open_source_tree(source or "bundled"), read.config["architecture"]
    is_asked = source is not None or architecture in tree.model_names()
    return read_config_defaults(tree, architecture) if is_asked else {}


def _require_heads(read: QuantisedCheckpoint) -> None:
    if not read.config.get("num_medusa_heads"):
        raise CheckpointError(
            "the checkpoint holds no Medusa heads to compare with",
            expected="num_medusa_heads above 0 in config.json",
            found="none",
            where=read.folder,
            next_step="name a folder with --out, and the heads are added",
        )


def _require_places(*folders: Path | None) -> None:
    """Raise RunFolderError unless each folder is new or empty, and none is named twice."""
    wanted = [folder.resolve() for folder in folders if folder is not None]
    for folder in wanted:
        require_free(folder)
    if len(set(wanted)) < len(wanted):
        raise RunFolderError(
            "two results would go into one folder",
            expected="a folder each",
            found="one for both",
            where=wanted[0],
            next_step="name another folder with --out or --dequantised",
        )


def _judge(
    read: QuantisedCheckpoint,
    faults: tuple[QuantisedFault, ...],
    compared: BaseComparison,
    written: list[str],
    watch: Stopwatch,
) -> StepOutcome:
    algorithm = read.algorithm.name if read.algorithm else "not quantised"
    errors, differences = compared.errors, compared.differences
    wrong = [error for error in errors if not error.passed]
    figures: dict[str, Any] = {"algorithm": algorithm, "ranks": len(read.ranks), "next_step": None}
    figures["not_judged_fields"] = list(compared.unjudged)
    if errors:
        figures["worst_weight_error"] = max(error.relative_error for error in errors)
        figures["unquantised_tensors"] = {"equal": compared.equal, "not_compared": compared.unknown}
    unproven = figures["unproven_scales"] = count_unproven_scales(read)
    gate = None
    summary = f"{algorithm}: config, weights and exclude list agree"
    if errors:
        worst = figures["worst_weight_error"]
        summary += f"; {len(errors)} matrices differ from the base's by rounding alone, worst {worst:.3g}"
        summary += f"; config and {compared.equal} tensors in 16 bit are the base's"
        summary += f", {compared.unknown} of heads not compared" if compared.unknown else ""
    if compared.unjudged:
        summary += f"; not judged, as the config leaves them out: {', '.join(compared.unjudged)}"
    if unproven:
        counted = ", ".join(f"{count} {kind}" for kind, count in unproven.items())
        summary += f"; present and positive, their values not proven: {counted}"
    if faults:
        gate = faults[0].kind
        summary = f"{algorithm}: {len(faults)} contradictions, first {faults[0].module}: {faults[0].text}"
        figures["next_step"] = "quantise again, or correct exclude_modules"
        if all(fault.kind == "no calibration" for fault in faults):
            summary = f"{algorithm}: quantised without calibration, {len(faults)} activation scales are absent"
            figures["next_step"] = f"quantise again with {CALIBRATION_SAMPLES} samples or more, or weights only"
    elif differences:
        gate = differences[0].kind
        summary = f"{algorithm}: {len(differences)} differences from the base, first {differences[0].text}"
        figures["next_step"] = suggest_correction(differences)
    elif wrong:
        gate = "weights"
        summary = f"{algorithm}: {len(wrong)} of {len(errors)} matrices are not the base's, first {describe(wrong[0])}"
        figures["next_step"] = "quantise this base again: scales or weights are another model's"
    return StepOutcome(
        "quantised",
        Verdict.PASS if gate is None else Verdict.FAIL,
        summary,
        covered=(Coverage.WEIGHTS,) if errors and gate is None else (),
        figures=figures,
        products=tuple(written),
        seconds=round(watch.seconds, 3),
        failing_gate=gate,
    )


def suggest_correction(differences: Sequence[QuantisedFault]) -> str:
    """What to do about differences from the base."""
    fields = [fault.module for fault in differences if fault.kind == "config"]
    if fields == ["vocab_size"] and "row of zeros" in differences[0].text:
        return "take the rows behind the base's vocabulary out of embedding and output matrix, and correct vocab_size"
    if len(fields) < len(differences) or set(fields) & {*STRUCTURE, "vocab_size"}:
        return "quantise this base again: config or tensors are another model's"
    return f"correct {', '.join(fields)} in the checkpoint's config.json to the base's values"


def describe(error: WeightError) -> str:
    """What is wrong with one matrix, in a few words."""
    if error.scale_fault is not None and error.relative_error <= error.bound:
        return f"{error.module}: {error.scale_fault}"
    return f"{error.module}: error {error.relative_error:.3g}, rounding explains {error.bound:.3g}"


def format_quantised(result: QuantisedResult) -> str:
    """Faults, the worst matrices and the verdict, for a terminal."""
    found = (*result.faults, *result.compared.differences)
    lines = [f"{fault.kind}: {fault.module}: {fault.text}" for fault in found[:10]]
    if len(found) > 10:
        lines.append(f"... {len(found)} in all")
    for error in sorted(result.errors, key=lambda error: (error.passed, -error.relative_error))[:5]:
        lines.append(f"{error.module}: {error.relative_error:.3g} of the base's norm (bound {error.bound:.3g})")
        lines += [f"  {error.scale_fault}"] if error.scale_fault else []
    if result.compared.unjudged:
        lines.append(f"not judged, no default known: {', '.join(result.compared.unjudged)} (--source names a release)")
    lines += [f"  {product}" for product in result.outcome.products]
    if result.outcome.figures.get("next_step"):
        lines.append(f"next step: {result.outcome.figures['next_step']}")
    lines.append(f"quantised: {result.outcome.said}")
    return "\n".join(lines)
