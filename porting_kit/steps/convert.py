"""The convert step: base weights and heads become a TensorRT-LLM checkpoint, every tensor accounted for.

The checkpoint is written beside its final place and takes it when it is complete; a receipt of both sides goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from porting_kit.conversion import ConversionOutcome, convert_checkpoint
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.run_folder import replace_folder, write_json
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.fit import describe_fit, measure_port_activations, plan_port_fit
from porting_kit.steps.preflight import (
    open_port_tree,
    read_port_base,
    read_port_heads,
    read_port_tree,
    target_profile,
    target_release,
)

RECEIPT = "receipt.json"
TREE_FILE = "medusa_choices.json"


@dataclass(frozen=True)
class ConvertResult:
    """What the conversion made."""

    outcome: StepOutcome
    conversion: ConversionOutcome

    def document(self) -> dict[str, Any]:
        """The `--json` document, receipt included."""
        return {**self.outcome.as_dict(), "receipt": self.conversion.receipt()}


def convert_port(run: PortRun) -> ConvertResult:
    """Convert the port's base and heads, prove the result by the inverse rules, and write the checkpoint.

    Raises:
        BaseModelError, HeadsError, TreeError, ConversionError: unusable input; nothing is left behind.
    """
    with running_step(run, "convert") as watch:
        port = run.port
        source_tree = open_port_tree(port)
        profile = target_profile(port, source_tree)
        release = target_release(source_tree, profile)
        base = read_port_base(port, release)
        heads = read_port_heads(port, base, check_values=True)
        tree = read_port_tree(port, heads)
        fit = plan_port_fit(port, base, profile)
        activations = measure_port_activations(port, source_tree, fit)
        with replace_folder(run.folder.checkpoint) as folder:
            conversion = convert_checkpoint(
                port.base_path,
                folder,
                heads=heads,
                dtype=port.dtype,
                tp_size=port.target.tp_size,
                pp_size=port.target.pp_size,
                release=release,
                fit=fit.for_conversion(activations) if fit.steps else None,
            )
            write_json(folder / RECEIPT, conversion.receipt())
            write_json(folder / TREE_FILE, tree.choices())
        names = sorted(file.name for file in conversion.files)
        outcome = StepOutcome(
            step="convert",
            verdict=Verdict.PASS,
            summary=(
                f"{len(conversion.targets)} tensors from {len(conversion.sources)}, all accounted for, "
                f"{conversion.verified} proved by the inverse rules"
            ),
            covered=(Coverage.WEIGHTS,),
            figures={
                "architecture": conversion.config["architecture"],
                "dtype": port.dtype,
                "ranks": port.target.tp_size * port.target.pp_size,
                "sources": len(conversion.sources),
                "targets": len(conversion.targets),
                "verified": conversion.verified,
                "heads_layout": heads.layout,
                "heads": heads.num_heads,
                "head_layers": heads.num_layers,
                "tree_nodes": tree.num_nodes,
                "bytes": sum((run.folder.checkpoint / name).stat().st_size for name in names),
                "warnings": list(conversion.warnings),
                "fit": describe_fit(fit),
            },
            products=tuple(f"checkpoint/{name}" for name in (*names, RECEIPT, TREE_FILE)),
        )
        return ConvertResult(finish_step(run, outcome, watch), conversion)


def format_conversion(result: ConvertResult) -> str:
    """A few lines for a terminal."""
    lines = [f"warning: {warning}" for warning in result.conversion.warnings]
    lines.append(f"convert: {result.outcome.verdict.value} - {result.outcome.summary}")
    lines += [f"  {product}" for product in result.outcome.products]
    return "\n".join(lines)
