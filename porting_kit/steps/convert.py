"""The convert step: base weights and heads become a TensorRT-LLM checkpoint, every tensor accounted for.

The checkpoint is written into its final folder under hidden names; `config.json` comes last and makes it one. A run
that was stopped is continued by the next. A receipt of both sides goes with it. `prove_port` reads both sides again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from porting_kit.conversion import ConversionOutcome, add_heads, convert_checkpoint
from porting_kit.conversion.estimate import ConversionEstimate, estimate_conversion
from porting_kit.conversion.output_folder import RECEIPT
from porting_kit.errors import PortingKitError
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.conversion_inputs import TREE_FILE, ConversionInputs, open_conversion
from porting_kit.steps.fit import describe_fit, measure_port_activations
from porting_kit.steps.preflight import judge_engine
from porting_kit.steps.progress import ProgressBar

__all__ = ["RECEIPT", "TREE_FILE", "ConvertResult", "EstimateResult", "convert_port", "estimate_port"]

ANNOUNCED_BYTES = 256 << 20
"""A conversion that takes a moment says beforehand what it needs."""


@dataclass(frozen=True)
class ConvertResult:
    """What the conversion made."""

    outcome: StepOutcome
    conversion: ConversionOutcome

    def document(self) -> dict[str, Any]:
        """The `--json` document, receipt included."""
        return {**self.outcome.as_dict(), "receipt": self.conversion.receipt()}


@dataclass(frozen=True)
class EstimateResult:
    """What a conversion would need; a pass says that nothing stands in the way, not that anything was converted."""

    outcome: StepOutcome
    estimate: ConversionEstimate

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), "estimate": self.estimate.as_dict()}


def convert_port(run: PortRun, *, verify: bool = True, workers: int | None = None) -> ConvertResult:
    """Convert the port's base and heads and write the checkpoint.

    Args:
        verify: read every tensor back and prove it by the inverse rules before the checkpoint is complete.
        workers: threads; chosen by the machine when None. The bytes written do not depend on it.

    Raises:
        BaseModelError, HeadsError, TreeError, ConversionError: unusable input; nothing is left behind.
        CheckpointError: the folder is in use, or the disk is full.
    """
    with running_step(run, "convert") as watch:
        inputs = open_conversion(run.port, check_values=True)
        activations = measure_port_activations(run.port, inputs.source_tree, inputs.fit)
        with ProgressBar("convert") as bar:
            expected = estimate_conversion(inputs.plan(), inputs.sources, run.folder.checkpoint)
            if expected.output_bytes > ANNOUNCED_BYTES:
                bar.say(expected.describe())
            warnings = (*inputs.warnings, *_warn_of_engine(run))
            for warning in warnings:
                bar.say(warning)
            options = {
                "heads": inputs.heads,
                "release": inputs.release,
                "verify": verify,
                "workers": workers,
                "progress": bar.show,
                "documents": {TREE_FILE: inputs.tree.choices()},
            }
            if inputs.joined is not None:
                conversion = add_heads(run.port.base_checkpoint_path, run.folder.checkpoint, **options)
            else:
                conversion = convert_checkpoint(
                    run.port.base_path,
                    run.folder.checkpoint,
                    dtype=run.port.dtype,
                    tp_size=run.port.target.tp_size,
                    pp_size=run.port.target.pp_size,
                    fit=inputs.fit.for_conversion(activations) if inputs.fit.steps else None,
                    **options,
                )
        return ConvertResult(finish_step(run, _judge(run, inputs, conversion, warnings), watch), conversion)


def estimate_port(run: PortRun) -> EstimateResult:
    """What the conversion would need, from headers alone; refuses what cannot work. Writes no outcome."""
    inputs = open_conversion(run.port)
    plan = inputs.plan()
    estimate = estimate_conversion(plan, inputs.sources, run.folder.checkpoint, probe=True)
    for warning in (*inputs.warnings, *_warn_of_engine(run)):
        print(f"convert: {warning}", file=sys.stderr)
    outcome = StepOutcome("convert", Verdict.PASS, estimate.describe(), figures=estimate.as_dict())
    return EstimateResult(outcome, estimate)


def _warn_of_engine(run: PortRun) -> tuple[str, ...]:
    """What preflight says against an engine of this port: the emulator can run such a checkpoint all the same."""
    try:
        preflight = judge_engine(run.port)
    except PortingKitError as error:
        return (f"preflight refuses this port: {error.subject}",)
    words = {Verdict.REFUSED: "refuses", Verdict.FAIL: "fails"}
    if preflight.verdict not in words:
        return ()
    return (f"preflight {words[preflight.verdict]} an engine of this port: {preflight.summary}",)


def _judge(
    run: PortRun, inputs: ConversionInputs, conversion: ConversionOutcome, warnings: tuple[str, ...]
) -> StepOutcome:
    names = sorted(file.name for file in conversion.files)
    proved = (
        f"{conversion.verified} proved by the inverse rules" if conversion.verified else "not yet proved (--verify)"
    )
    return StepOutcome(
        step="convert",
        verdict=Verdict.PASS,
        summary=f"{len(conversion.targets)} tensors from {len(conversion.sources)}, all accounted for, {proved}",
        covered=(Coverage.WEIGHTS,),
        figures={
            "architecture": conversion.config["architecture"],
            "dtype": conversion.config["dtype"],
            "ranks": conversion.config["mapping"]["world_size"],
            "sources": len(conversion.sources),
            "targets": len(conversion.targets),
            "verified": conversion.verified,
            "heads_layout": inputs.heads.layout,
            "heads": inputs.heads.num_heads,
            "head_layers": inputs.heads.num_layers,
            "tree_nodes": inputs.tree.num_nodes,
            "bytes": sum((run.folder.checkpoint / name).stat().st_size for name in names),
            "seconds_converting": round(conversion.seconds, 3),
            "resumed_spans": conversion.resumed_spans,
            "warnings": [*warnings, *conversion.warnings],
            "fit": describe_fit(inputs.fit),
        },
        products=tuple(f"checkpoint/{name}" for name in (*names, RECEIPT, TREE_FILE)),
    )


def format_conversion(result: ConvertResult) -> str:
    """A few lines for a terminal."""
    lines = [f"warning: {warning}" for warning in result.conversion.warnings]
    lines.append(f"convert: {result.outcome.said}")
    lines += [f"  {product}" for product in result.outcome.products]
    return "\n".join(lines)


def format_estimate(result: EstimateResult) -> str:
    """One line for a terminal."""
    return f"convert: {result.outcome.said}"
