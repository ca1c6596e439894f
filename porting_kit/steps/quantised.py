"""The quantised step: a quantised checkpoint against itself and its base, its 16-bit twin, and heads added to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from porting_kit.conversion.dequantised import require_quantised, write_dequantised
from porting_kit.conversion.quantised import CALIBRATION_SAMPLES, QuantisedFault, find_faults
from porting_kit.conversion.quantised_comparison import WeightError, compare_ranks, find_layout
from porting_kit.conversion.quantised_files import QuantisedCheckpoint, read_quantised
from porting_kit.conversion.quantised_heads import add_heads
from porting_kit.errors import CheckpointError, RunFolderError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.run_folder import require_free
from porting_kit.steps.context import Stopwatch

DEFAULT_DRAFT_TOKENS = 63


@dataclass(frozen=True)
class QuantisedResult:
    """What was found, and what was written.

    Args:
        outcome: the verdict.
        faults: contradictions between config, weights, heads and exclude list.
        errors: each quantised matrix against the base's; empty when no base was given.
    """

    outcome: StepOutcome
    faults: tuple[QuantisedFault, ...]
    errors: tuple[WeightError, ...]

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            **self.outcome.as_dict(),
            "faults": [vars(fault) for fault in self.faults],
            "weight_errors": [{**vars(error), "passed": error.passed} for error in self.errors],
        }


def check_quantised(
    checkpoint: Path,
    *,
    base: Path | None = None,
    heads: Path | None = None,
    dequantised: Path | None = None,
    out: Path | None = None,
    max_draft_len: int = DEFAULT_DRAFT_TOKENS,
) -> QuantisedResult:
    """Check a quantised checkpoint, and write what was asked for when it is sound.

    Args:
        checkpoint: its folder.
        base: the Hugging Face base, to compare the weights with.
        heads: Medusa heads to add in 16 bit; needs `out`.
        dequantised: where the 16-bit twin goes, for the emulator.
        out: where the checkpoint with heads goes.
        max_draft_len: draft tokens of the largest tree.

    Raises:
        CheckpointError: files that cannot be read, a checkpoint that is not quantised or of another base, heads that do
            not fit, or weights interleaved for a card and no base to tell for which.
        HeadsError: unusable heads.
        RunFolderError: a folder to write into is occupied, or both are one.
    """
    if (heads is None) != (out is None):
        raise CheckpointError("heads and a folder for the result belong together", found=f"{heads}, {out}")
    _require_places(out, dequantised)
    watch = Stopwatch()
    read = read_quantised(checkpoint)
    faults = find_faults(read)
    errors: tuple[WeightError, ...] = ()
    written: list[str] = []
    layout = None
    if not faults and base is not None:
        from porting_kit.conversion.convert import checkpoint_ranks

        require_quantised(read)
        ranks = checkpoint_ranks(base, dtype=read.dtype, tp_size=read.tp_size, pp_size=read.pp_size)[1]
        layout = find_layout(read, ranks)
        errors = compare_ranks(read, ranks, layout)
    is_sound = not faults and all(error.passed for error in errors)
    if is_sound and dequantised is not None:
        written.append(str(write_dequantised(checkpoint, dequantised, layout=layout)))
    if is_sound and heads is not None and out is not None:
        from porting_kit.conversion.heads import read_head_set

        written.append(str(add_heads(checkpoint, read_head_set(heads), out, max_draft_len=max_draft_len)))
    return QuantisedResult(_judge(read, faults, errors, written, watch), faults, errors)


def _require_places(*folders: Path | None) -> None:
    """Raise RunFolderError unless each folder is new or empty, and none is named twice."""
    wanted = [folder.resolve() for folder in folders if folder is not None]
    for folder in wanted:
        require_free(folder)
    if len(set(wanted)) < len(wanted):
        raise RunFolderError("two results would go into one folder", expected="a folder each", where=wanted[0])


def _judge(
    read: QuantisedCheckpoint,
    faults: tuple[QuantisedFault, ...],
    errors: tuple[WeightError, ...],
    written: list[str],
    watch: Stopwatch,
) -> StepOutcome:
    algorithm = read.algorithm.name if read.algorithm else "not quantised"
    wrong = [error for error in errors if not error.passed]
    figures: dict[str, Any] = {"algorithm": algorithm, "ranks": len(read.ranks), "next_step": None}
    if errors:
        figures["worst_weight_error"] = max(error.relative_error for error in errors)
    gate = None
    summary = f"{algorithm}: config, weights and exclude list agree"
    if errors:
        worst = figures["worst_weight_error"]
        summary += f"; {len(errors)} matrices within {errors[0].bound} of the base's, worst {worst:.3g}"
    if faults:
        gate = faults[0].kind
        summary = f"{algorithm}: {len(faults)} contradictions, first {faults[0].module}: {faults[0].text}"
        figures["next_step"] = "quantise again, or correct exclude_modules"
        if all(fault.kind == "no calibration" for fault in faults):
            summary = f"{algorithm}: quantised without calibration, {len(faults)} activation scales are absent"
            figures["next_step"] = f"quantise again with {CALIBRATION_SAMPLES} samples or more, or weights only"
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


def describe(error: WeightError) -> str:
    """What is wrong with one matrix, in a few words."""
    if error.scale_fault is not None and error.relative_error <= error.bound:
        return f"{error.module}: {error.scale_fault}"
    return f"{error.module}: error {error.relative_error:.3g}, rounding explains {error.bound}"


def format_quantised(result: QuantisedResult) -> str:
    """Faults, the worst matrices and the verdict, for a terminal."""
    lines = [f"{fault.kind}: {fault.module}: {fault.text}" for fault in result.faults[:10]]
    if len(result.faults) > 10:
        lines.append(f"... {len(result.faults)} in all")
    for error in sorted(result.errors, key=lambda error: (error.passed, -error.relative_error))[:5]:
        lines.append(f"{error.module}: {error.relative_error:.3g} of the base's norm (bound {error.bound})")
        lines += [f"  {error.scale_fault}"] if error.scale_fault else []
    lines += [f"  {product}" for product in result.outcome.products]
    if result.outcome.figures.get("next_step"):
        lines.append(f"next step: {result.outcome.figures['next_step']}")
    lines.append(f"quantised: {result.outcome.verdict.value} - {result.outcome.summary}")
    return "\n".join(lines)
