"""Run all notebooks headless, the way a reader runs them by hand: papermill, one notebook a step.

Names, kernel and parameters cells are checked before anything runs. A failing gate stops the later notebooks, except
the report, which is always written. A notebook counts as passed only when its step left an outcome of this run:
papermill (2.7) takes `sys.exit(0)` in a cell for success.

This module does not know what the steps compute; it reads their outcomes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from porting_kit.errors import PortingKitError, VerdictFailed
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.port import known_field_names
from porting_kit.run_folder import STEPS
from porting_kit.steps.context import PortRun, open_port_run
from porting_kit.steps.notebook_parameters import PORT_SHORTCUTS, refuse_unknown_names
from porting_kit.steps.notebook_run import (
    Notebook,
    NotebookFailure,
    check_kernel,
    execute_notebook,
    executed_file,
    find_notebooks,
    mark_notebook,
)
from porting_kit.steps.report import combine_outcomes, write_report

KERNEL = "python3"
REPORT_STEP = STEPS[-1]
LIMIT_S = 3600.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class WorkbookResult:
    """What a run of all notebooks came to.

    Args:
        outcome: the combined outcome; `failing_gate` names the first gate that failed.
        outcomes: step -> outcome, in order, for the steps that ran.
        failed_notebook: file name of the first notebook that stopped, None when none did.
        executed: step -> executed notebook in the run folder.
        report: the report file.
    """

    outcome: StepOutcome
    outcomes: dict[str, StepOutcome]
    failed_notebook: str | None
    executed: dict[str, Path] = field(default_factory=dict)
    report: Path | None = None

    @property
    def verdict(self) -> Verdict:
        """The combined verdict."""
        return self.outcome.verdict

    @property
    def failing_gate(self) -> str | None:
        """The first gate that failed."""
        return self.outcome.failing_gate

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail or refused, 3 the machine lacks something."""
        return self.verdict.exit_code

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            **self.outcome.as_dict(),
            "failed_notebook": self.failed_notebook,
            "steps": {step: outcome.as_dict() for step, outcome in self.outcomes.items()},
            "notebooks": {step: str(file) for step, file in self.executed.items()},
            "report": None if self.report is None else str(self.report),
        }


def run_workbook(
    port_file: str | Path,
    *,
    run_folder: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    keep_going: bool = False,
    progress: bool = True,
    notebooks: str | Path | None = None,
    kernel_name: str = KERNEL,
    limit_s: float = LIMIT_S,
) -> WorkbookResult:
    """Run the notebooks of a folder in the order of their numbers.

    Args:
        port_file: the YAML file.
        run_folder: where results go; `runs/<name>` under the working directory when None.
        overrides: field values by (dotted) name, as `-p` gives them.
        keep_going: run the later notebooks after a failing gate too; the verdict stays failed.
        progress: print one line a notebook on stderr, and a bar of its cells when stderr is a terminal.
        notebooks: the folder to take them from; the project's own when None.
        kernel_name: the Jupyter kernel that runs them.
        limit_s: seconds one notebook may take.

    Raises:
        NotebookError: a parameters cell is wrong, a name is unknown, or no notebook is there. Nothing was run.
        EnvironmentMissing: no such kernel. Nothing was run.
        PortFileError, RunFolderError: see `open_port_run`. Nothing was run.
        PortingKitError: a step could not use its input (the kind that the step raised); the report is written.
    """
    say: Progress = (lambda text: print(text, file=sys.stderr, flush=True)) if progress else (lambda text: None)
    found = find_notebooks(notebooks)
    check_names(overrides or {}, found)
    check_kernel(kernel_name)
    run = open_port_run(port_file, run_folder=run_folder, overrides=overrides)
    for step in STEPS:
        run.folder.begin(step)

    failures: dict[str, NotebookFailure] = {}
    for place, notebook in enumerate(found, start=1):
        if failures and not keep_going and notebook.step != REPORT_STEP:
            executed_file(run.folder, notebook).unlink(missing_ok=True)
            continue
        started = time.perf_counter()
        parameters = _parameters_for(notebook, run.port_file, run.folder.root, overrides or {})
        failure = execute_notebook(notebook, run.folder, parameters, kernel_name, limit_s, show_cells=progress)
        seconds = time.perf_counter() - started
        failure, verdict = _settle(run, notebook, failure, seconds)
        if failure is not None:
            failures[notebook.file.name] = failure
        say(f"{run.folder.root.name:<18} [{place}/{len(found)}] {notebook.file.stem:<20} {verdict:<8} {seconds:6.1f} s")
    return _conclude(run, found, failures)


def check_names(overrides: Mapping[str, Any], notebooks: list[Notebook]) -> None:
    """Refuse names that are no field of the port file, and notebooks that cannot take what will be passed."""
    refuse_unknown_names(overrides, known_field_names(), "the parameters of this run")
    for notebook in notebooks:
        passed = _parameters_for(notebook, "", "", overrides)
        refuse_unknown_names(passed, notebook.parameters, notebook.file)


def format_workbook(result: WorkbookResult) -> str:
    """The result for a terminal: the verdict, what it covered, what failed, where to read on."""
    outcome = result.outcome.as_dict()
    lines = [
        f"verdict: {result.outcome.said}",
        f"covered: {', '.join(outcome['covered']) or 'nothing'}",
        f"not covered: {', '.join(outcome['not_covered']) or 'nothing'}",
    ]
    if result.failing_gate:
        lines.append(f"failing gate: {result.failing_gate} (notebook {result.failed_notebook})")
    if result.report is not None:
        lines.append(f"report: {result.report}")
    return "\n".join(lines)


def _parameters_for(
    notebook: Notebook, port_file: str | Path, run_folder: str | Path, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """What is passed to one notebook. Fields that have a parameter of their own go there, the rest into `overrides`."""
    shortcuts = {name: value for name, value in overrides.items() if name in PORT_SHORTCUTS}
    rest = {name: value for name, value in overrides.items() if name not in PORT_SHORTCUTS}
    passed = {"port_file": str(port_file), "run_folder": str(run_folder), "interactive": False, **shortcuts}
    return {**passed, "overrides": rest} if rest else passed


def _settle(
    run: PortRun, notebook: Notebook, failure: NotebookFailure | None, seconds: float
) -> tuple[NotebookFailure | None, str]:
    """Compare how the notebook ended with what its step left behind; both have to say pass.

    Returns:
        The failure, None when there is none, and the verdict to print. The step's outcome then says the same.
    """
    outcome = run.folder.outcome(notebook.step)
    if outcome is None and failure is None:
        failure = NotebookFailure("NoOutcome", f"{notebook.file.name} ended without running its step")
        mark_notebook(executed_file(run.folder, notebook), failure)
    broken = outcome is not None and outcome.verdict in (Verdict.FAIL, Verdict.REFUSED)
    if broken and failure is None:
        failure = NotebookFailure("VerdictFailed", outcome.summary)
    if failure is None or broken or notebook.step == REPORT_STEP:
        return failure, outcome.verdict.value if outcome else "failed"
    outcome = _record_failure(run, notebook, failure, outcome, seconds)
    run.folder.finish(outcome)
    return failure, outcome.verdict.value


def _record_failure(
    run: PortRun, notebook: Notebook, failure: NotebookFailure, outcome: StepOutcome | None, seconds: float
) -> StepOutcome:
    """The outcome of a step whose notebook stopped before, or in spite of, a good outcome."""
    kind = failure.error_class
    is_gate = failure.name == VerdictFailed.__name__
    verdict = {1: Verdict.REFUSED, 3: Verdict.NOT_RUN}.get(kind.exit_code if kind else 2, Verdict.FAIL)
    return StepOutcome(
        step=notebook.step,
        verdict=Verdict.FAIL if is_gate else verdict,
        summary=failure.headline,
        figures={**(outcome.figures if outcome else {}), "error": failure.name, "message": failure.message},
        products=outcome.products if outcome else (),
        made=outcome.made if outcome else {},
        inputs=run.inputs(notebook.step),
        seconds=round(seconds, 3),
        failing_gate=failure.headline if is_gate else f"{failure.name} in {notebook.file.name}",
    )


def _conclude(run: PortRun, notebooks: list[Notebook], failures: dict[str, NotebookFailure]) -> WorkbookResult:
    """Combine the outcomes, see that the report is there, and hand out the result."""
    if run.folder.outcome(REPORT_STEP) is None:
        write_report(run)
    outcomes = {step: outcome for step in STEPS if (outcome := run.folder.outcome(step)) is not None}
    combined = combine_outcomes(outcomes)
    first = _failing_notebook(notebooks, failures, outcomes, combined)
    if first is not None and combined.verdict is Verdict.PASS:  # only the report notebook stopped
        gate = f"{failures[first].name} in {first}"
        combined = replace(combined, verdict=Verdict.FAIL, summary=failures[first].headline, failing_gate=gate)
    kind = failures[first].error_class if first else None
    if kind is not None and kind.exit_code == PortingKitError.exit_code:
        raise kind(f"{failures[first].message}\n  notebook: {first}\n  report: {run.folder.report}")
    executed = {item.step: file for item in notebooks if (file := executed_file(run.folder, item)).is_file()}
    return WorkbookResult(combined, outcomes, first, executed, run.folder.report)


def _failing_notebook(
    notebooks: list[Notebook],
    failures: Mapping[str, NotebookFailure],
    outcomes: Mapping[str, StepOutcome],
    combined: StepOutcome,
) -> str | None:
    """The notebook whose step gave the combined verdict; the first that stopped when only the report's did."""
    for notebook in notebooks:
        outcome = outcomes.get(notebook.step)
        if notebook.file.name in failures and outcome is not None and outcome.verdict is combined.verdict:
            return notebook.file.name
    return next(iter(failures), None)
