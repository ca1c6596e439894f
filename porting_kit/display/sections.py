"""The report's sections, each made from what its step left in the run folder; a step that has not run has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from porting_kit.display import alignment_view, results
from porting_kit.display.diff_view import view_diff
from porting_kit.display.plots import plot_tree
from porting_kit.display.tables import Code, Facts, Folded, Preformatted, Table
from porting_kit.outcomes import StepOutcome
from porting_kit.provenance import describe_environment
from porting_kit.run_folder import STEPS
from porting_kit.whole_files import read_json

if TYPE_CHECKING:
    from porting_kit.steps.context import PortRun

Outcomes = Mapping[str, StepOutcome]


@dataclass(frozen=True)
class Section:
    """One part of the page: an anchor, a heading, a sentence, and objects with `to_html`."""

    anchor: str
    title: str
    parts: tuple[Any, ...]
    lead: str = ""


def report_sections(run: PortRun, outcomes: Outcomes) -> list[Section]:
    """Every section there is something for, in the order of the steps."""
    makers: tuple[Callable[[PortRun, Outcomes], Section | None], ...] = (
        _steps,
        _failure,
        _gates,
        _patch,
        _conversion,
        _build,
        _alignment,
        _layers,
        _provenance,
    )
    return [section for make in makers if (section := make(run, outcomes)) is not None]


def find_cause(outcomes: Outcomes) -> str | None:
    """The named cause of a failed alignment, None when none was looked for or found."""
    align = outcomes.get("align")
    cause = align.figures.get("cause") if align else None
    return (cause.get("verdict") or cause.get("name")) if isinstance(cause, Mapping) else None


def find_fix(outcomes: Outcomes) -> str | None:
    """What to do next: the fix of the named cause, or the next step that the failing step gave."""
    align = outcomes.get("align")
    cause = align.figures.get("cause") if align else None
    if isinstance(cause, Mapping) and cause.get("fix"):
        return cause["fix"]
    return next((item.figures["next_step"] for item in outcomes.values() if item.figures.get("next_step")), None)


def read_document(file: Path) -> Any:
    """A JSON document of the run folder, None when it is not there."""
    return read_json(file) if file.is_file() else None


def _steps(run: PortRun, outcomes: Outcomes) -> Section:
    return Section("steps", "Steps", (results.steps_table(outcomes, STEPS[:-1]),))


def _failure(run: PortRun, outcomes: Outcomes) -> Section | None:
    messages = [
        Preformatted(item.figures["message"], title=f"{step}: {item.figures['error']}")
        for step, item in outcomes.items()
        if item.figures.get("message")
    ]
    return Section("stopped", "What stopped the run", tuple(messages)) if messages else None


def _gates(run: PortRun, outcomes: Outcomes) -> Section | None:
    gates = outcomes["preflight"].figures.get("gates") if "preflight" in outcomes else None
    if not gates:
        return None
    return Section("gates", "Gates", (results.gates_table(gates),), outcomes["preflight"].summary)


def _patch(run: PortRun, outcomes: Outcomes) -> Section | None:
    diff = run.folder.patched / "port.patch"
    if "patch" not in outcomes or not diff.is_file():
        return None
    view = view_diff(diff.read_text(encoding="utf-8"))
    return Section("patch", "Patch", (view,), outcomes["patch"].summary)


def _conversion(run: PortRun, outcomes: Outcomes) -> Section | None:
    receipt = read_document(run.folder.checkpoint / "receipt.json")
    if "convert" not in outcomes or receipt is None:
        return None
    parts = (
        results.accounting_table(receipt["sources"], receipt["targets"]),
        results.field_table(receipt["fields"]),
        Folded(f"All {len(receipt['targets'])} tensors", results.tensor_table(receipt["targets"], limit=None)),
    )
    warnings = Table(("warning",), [(text,) for text in receipt["warnings"]]) if receipt["warnings"] else None
    return Section("conversion", "Conversion", (*parts, *filter(None, [warnings])), outcomes["convert"].summary)


def _build(run: PortRun, outcomes: Outcomes) -> Section | None:
    if "build" not in outcomes:
        return None
    script, plan = run.folder.engine / "build.sh", read_document(run.folder.engine / "build_plan.json")
    parts: list[Any] = []
    if script.is_file():
        parts.append(Preformatted(script.read_text(encoding="utf-8"), title="engine/build.sh"))
    if plan:
        parts += [results.flags_table(plan["flags"]), Table(("remark",), [(text,) for text in plan["remarks"]])]
    return Section("build", "Build", tuple(parts), outcomes["build"].summary)


def _alignment(run: PortRun, outcomes: Outcomes) -> Section | None:
    alignment = read_document(run.folder.alignment / "alignment.json")
    if "align" not in outcomes or alignment is None:
        return None
    choices = read_document(run.folder.checkpoint / "medusa_choices.json")
    control = read_document(run.folder.alignment / "control.json")
    parts = [
        alignment_view.alignment_facts(alignment),
        alignment_view.checks_table(alignment),
        alignment_view.control_facts(control),
        alignment_view.divergence_facts(alignment),
        alignment_view.cause_view(alignment["cause"]),
        alignment_view.fit_table(alignment),
        alignment_view.inherent_table(alignment),
        alignment_view.acceptance_view(alignment),
        alignment_view.margins_plot(alignment),
        alignment_view.texts_table(alignment, _decode_texts(run, alignment)),
        alignment_view.runs_table(alignment),
    ]
    if choices:
        from porting_kit.medusa.tree import read_tree

        parts.append(plot_tree(read_tree(choices)))
    return Section("alignment", "Alignment", tuple(parts), outcomes["align"].summary)


def _layers(run: PortRun, outcomes: Outcomes) -> Section | None:
    alignment = read_document(run.folder.alignment / "alignment.json")
    if "align" not in outcomes or not alignment or not alignment["layers"]:
        return None
    return Section("layers", "Layer by layer", (alignment_view.layers_view(alignment),))


def _provenance(run: PortRun, outcomes: Outcomes) -> Section:
    hashes = {name: value for item in outcomes.values() for name, value in item.inputs.items()}
    inputs = Table(("input", "SHA-256"), [(name, Code(value[:16])) for name, value in sorted(hashes.items())])
    settings = Preformatted(yaml.safe_dump(run.port.model_dump(mode="json"), sort_keys=False), title="Settings")
    parts = (Facts(list(describe_environment().items()), title="Environment"), settings, inputs)
    return Section("provenance", "Provenance", parts)


def _decode_texts(run: PortRun, alignment: Mapping[str, Any]) -> list[str]:
    """What each prompt was answered with, by the base's own tokenizer file; empty when there is none."""
    file = run.port.base_path / "tokenizer.json"
    if not file.is_file():
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return [tokenizer.decode(row["tokens"]) for row in alignment["rows"]]
