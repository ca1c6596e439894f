"""The run folder: where each step reads and writes, and how a half-written or stale result is told from a good one.

Layout of `runs/<name>/`: `run.json` (the port that owns the folder), one folder a step with `outcome.json` and the
executed notebook, and the products: `patched/`, `checkpoint/`, `engine/`, `alignment/`, `report.html`.

A step's outcome is removed before the step starts and written last, so a run that dies leaves no outcome. Those of
later steps stay: their inputs tell whether they still hold. This module does not know what the steps compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from porting_kit.errors import RunFolderError
from porting_kit.outcomes import StepOutcome
from porting_kit.products import find_edits
from porting_kit.whole_files import read_json, unwritable, write_json

STEPS = ("preflight", "patch", "convert", "build", "align", "report")
PRODUCTS = {
    "preflight": (),
    "patch": ("patched",),
    "convert": ("checkpoint",),
    "build": ("engine",),
    "align": ("alignment",),
    "report": ("report.html",),
}
MARKER = "run.json"


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. Make it with `open_run_folder`."""

    root: Path

    @property
    def patched(self) -> Path:
        """Products of the patch step."""
        return self.root / "patched"

    @property
    def checkpoint(self) -> Path:
        """The TensorRT-LLM checkpoint."""
        return self.root / "checkpoint"

    @property
    def engine(self) -> Path:
        """Build plan, and the engine where one was built."""
        return self.root / "engine"

    @property
    def alignment(self) -> Path:
        """Tokens, margins and per-layer figures of the check."""
        return self.root / "alignment"

    @property
    def report(self) -> Path:
        """The one-file report."""
        return self.root / "report.html"

    def step(self, step: str) -> Path:
        """The step's own folder: `outcome.json` and the executed notebook."""
        if step not in STEPS:
            raise RunFolderError(
                f"no step {step!r}", expected=", ".join(STEPS), found=repr(step), next_step="name one of them"
            )
        return self.root / step

    def begin(self, step: str) -> None:
        """Forget the step's earlier outcome and the report's, which shows it: until they rerun, they do not exist.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        try:
            for forgotten in (step, STEPS[-1]):
                (self.step(forgotten) / "outcome.json").unlink(missing_ok=True)
            self.step(step).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from error

    def finish(self, outcome: StepOutcome) -> None:
        """Write the outcome, last."""
        write_json(self.step(outcome.step) / "outcome.json", outcome.as_dict())

    def outcome(self, step: str) -> StepOutcome | None:
        """The step's outcome, None when the step has not finished.

        Raises:
            RunFolderError: the file is there and is not an outcome.
        """
        path = self.step(step) / "outcome.json"
        if not path.is_file():
            return None
        try:
            return StepOutcome.from_dict(read_json(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"the outcome of step {step!r} cannot be read",
                expected="the JSON file that the step wrote",
                found=error,
                where=path,
                next_step="rerun the step",
            ) from error

    def require(self, step: str, inputs: Mapping[str, str]) -> StepOutcome:
        """The outcome of an earlier step, refused when it is missing or was made from other inputs.

        Args:
            step: the step that must have run.
            inputs: name -> hash, as that step would see them now.

        Raises:
            RunFolderError: not run, or stale; names what changed.
        """
        outcome = self.outcome(step)
        if outcome is None:
            raise RunFolderError(
                f"step {step!r} has not finished in this run folder",
                expected="outcome.json of the step",
                found="none",
                where=self.root,
                next_step=f"run `porting-kit {step}` with the same port file and --out",
            )
        changed = outcome.changed_inputs(inputs)
        if changed:
            raise RunFolderError(
                f"the result of step {step!r} is stale: its inputs have changed since",
                expected="the inputs that the step read",
                found="changed: " + ", ".join(changed),
                where=self.step(step),
                next_step=f"rerun `porting-kit {step}`",
            )
        return outcome

    def find_edits(self, outcome: StepOutcome) -> tuple[str, ...]:
        """What became of a step's products since it finished, one clause each; none when they are as it made them.

        New times of files with the same content are kept in the outcome, so that they are read once.
        """
        edits, renewed = find_edits(self.root, outcome.made)
        if renewed:
            with contextlib.suppress(RunFolderError):  # a folder that may only be read
                self.finish(replace(outcome, made={**outcome.made, **renewed}))
        return tuple(f"{name}: {said}" for name, said in edits.items())


def open_run_folder(root: Path, port_name: str) -> RunFolder:
    """Open or create the run folder of one port.

    Raises:
        RunFolderError: the folder exists and belongs to something else, or cannot be written.
    """
    root = root.resolve()
    if root.exists() and not root.is_dir():
        raise RunFolderError(
            "the output path is a file",
            expected="a folder, or a new name",
            found="a file",
            where=root,
            next_step="name a folder with --out",
        )
    marker = root / MARKER
    if marker.is_file():
        owner = _read_owner(marker)
        if owner != port_name:
            raise RunFolderError(
                "the output folder holds the run of another port",
                expected=port_name,
                found=owner,
                where=root,
                next_step="name another folder with --out",
            )
    elif root.is_dir() and any(root.iterdir()):
        raise RunFolderError(
            "the output folder exists, is not empty and is no run folder",
            expected="a new or empty folder, or one of an earlier run",
            found=", ".join(sorted(item.name for item in root.iterdir())[:5]),
            where=root,
            next_step="name a new or empty folder with --out; nothing was changed",
        )
    else:
        try:
            root.mkdir(parents=True, exist_ok=True)
            write_json(marker, {"port": port_name})
        except OSError as error:
            raise unwritable(root, error) from error
    return RunFolder(root)


def _read_owner(marker: Path) -> object:
    try:
        return read_json(marker).get("port")
    except (ValueError, AttributeError):
        return "an unreadable run.json"
