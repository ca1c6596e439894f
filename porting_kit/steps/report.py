"""The report step: one HTML file that needs no network, readable on a phone, for a whole run or a broken-off one.

Everything it says is read back from the run folder, so it can be written again at any time. What each section shows
and how is `porting_kit.display`'s part; here the outcomes are combined and the file is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.run_folder import STEPS
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.whole_files import write_text

CHECKED_STEPS = STEPS[:-1]


@dataclass(frozen=True)
class ReportResult:
    """The report that was written and the combined outcome it shows."""

    outcome: StepOutcome
    combined: StepOutcome
    file: Path

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), "report": str(self.file)}


def write_report(run: PortRun) -> ReportResult:
    """Write `report.html` from whatever the run folder holds.

    The step's own verdict is that of the run, so that `porting-kit report` leaves with the run's exit code.
    """
    from porting_kit.display.page import render_report

    with running_step(run, "report") as watch:
        outcomes = read_outcomes(run)
        combined = combine_outcomes(outcomes)
        write_text(run.folder.report, render_report(run, outcomes, combined))
        figures = {"approximate_fit": combined.figures.get("approximate_fit")}
        outcome = replace(combined, step="report", products=(run.folder.report.name,), figures=figures)
        return ReportResult(finish_step(run, outcome, watch), combined, run.folder.report)


def read_outcomes(run: PortRun) -> dict[str, StepOutcome]:
    """The outcomes of the steps before the report that have finished, in order; a stale one counts as not run, and so
    does one whose products were edited."""
    found = {step: run.folder.outcome(step) for step in CHECKED_STEPS}
    return {step: _refuse_changed(run, outcome) for step, outcome in found.items() if outcome is not None}


def _refuse_changed(run: PortRun, outcome: StepOutcome) -> StepOutcome:
    """The outcome, or one that says that its inputs, or what it made, are not those of today."""
    changed = outcome.changed_inputs(run.inputs(outcome.step))
    edits = run.folder.find_edits(outcome)
    if not changed and not edits:
        return outcome
    how, what = ("stale", f"{', '.join(changed)} changed since") if changed else ("edited", "; ".join(edits))
    summary = f"{how}, rerun it: {what}"
    return StepOutcome(outcome.step, Verdict.NOT_RUN, summary, failing_gate=f"{outcome.step} is {how}")


def combine_outcomes(outcomes: Mapping[str, StepOutcome]) -> StepOutcome:
    """One outcome for the run: fail or refused when any step is, otherwise the alignment's, and not_run without one.

    A build that could not run (no tensorrt_llm here) does not spoil a pass: the engine is then listed as not covered.
    """
    ordered = [outcomes[step] for step in CHECKED_STEPS if step in outcomes]
    missing = [step for step in CHECKED_STEPS if step not in outcomes]
    judged = [outcome for outcome in ordered if outcome.verdict in (Verdict.PASS, Verdict.FAIL)]
    covered = {item for outcome in judged for item in outcome.covered}
    combined = StepOutcome(
        step="run",
        verdict=Verdict.NOT_RUN,
        summary="",
        covered=tuple(item for item in Coverage if item in covered),
        figures={"missing_steps": missing},
        seconds=round(sum(outcome.seconds for outcome in ordered), 3),
    )
    for verdict in (Verdict.FAIL, Verdict.REFUSED):
        broken = next((outcome for outcome in ordered if outcome.verdict is verdict), None)
        if broken is not None:
            gate = broken.failing_gate or broken.step
            return replace(combined, verdict=verdict, summary=f"{broken.step}: {broken.summary}", failing_gate=gate)
    stopped = next((item for item in ordered if item.verdict is Verdict.NOT_RUN and item.failing_gate), None)
    if stopped is not None:
        summary = f"{stopped.step}: {stopped.summary}"
        return replace(combined, summary=summary, failing_gate=stopped.failing_gate)
    if missing:
        return replace(combined, summary="not run yet: " + ", ".join(missing))
    alignment = outcomes["align"]
    figures = {**combined.figures, "approximate_fit": alignment.figures.get("approximate_fit")}
    return replace(combined, verdict=alignment.verdict, summary=alignment.summary, figures=figures)
