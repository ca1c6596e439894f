"""What every step starts from: the validated port, its run folder, and the hashes of what each step reads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from porting_kit.architectures import use_family_file
from porting_kit.errors import RunFolderError, VerdictFailed
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.port import Port, load_port
from porting_kit.products import describe_products
from porting_kit.provenance import fingerprint_path, hash_value
from porting_kit.run_folder import MARKER, STEPS, RunFolder, open_run_folder
from porting_kit.whole_files import read_json

RUNS_FOLDER = "runs"
OPENING_SECONDS = 30.0

# Which fields of the port a step's result depends on.
STEP_FIELDS = {
    "preflight": ("base", "base_checkpoint", "dtype", "heads", "trtllm", "tree", "target", "fit", "kernel"),
    "patch": ("base", "heads", "trtllm", "fit"),
    "convert": ("base", "base_checkpoint", "dtype", "heads", "trtllm", "tree", "target", "fit"),
    "build": ("base", "base_checkpoint", "dtype", "heads", "trtllm", "tree", "target", "fit"),
    "align": (
        "base",
        "base_checkpoint",
        "dtype",
        "heads",
        "trtllm",
        "tree",
        "target",
        "fit",
        "kernel",
        "engine",
        "alignment",
    ),
    "report": (),
}
MAKES_PRODUCTS, RESTS_ON_PRODUCTS = ("patch", "convert"), ("build", "align")
"""The second read what the first make: while those make the same again, the outcomes of the second hold."""


@dataclass(frozen=True)
class PortRun:
    """One port, where its steps read and write, and the file it came from."""

    port: Port
    folder: RunFolder
    port_file: Path

    def inputs(self, step: str) -> dict[str, str]:
        """Name -> hash of everything the step's result depends on. A change makes the result stale."""
        fields = STEP_FIELDS[step]
        if fields and self.port.fit != "off":
            # A fit is made for the kernels of the target.
            fields = tuple(dict.fromkeys((*fields, "kernel", "target", "dtype")))
        hashes = {f"port.{name}": hash_value(self.port.fields(name)) for name in fields}
        if "base" in fields and self.port.architecture_path is not None:
            hashes["architecture file"] = fingerprint_path(self.port.architecture_path)
        if "base" in fields:
            hashes["base files"] = fingerprint_path(self.port.base_path)
        if "base_checkpoint" in fields and self.port.base_checkpoint_path is not None:
            hashes["base checkpoint files"] = fingerprint_path(self.port.base_checkpoint_path)
        if "heads" in fields:
            hashes["heads files"] = fingerprint_path(self.port.heads_path)
        for name, file in _find_named_files(self.port, fields).items():
            hashes[name] = fingerprint_path(file)
        if step in RESTS_ON_PRODUCTS:
            hashes["patched files"] = fingerprint_path(self.folder.patched)
            hashes["checkpoint"] = _fingerprint_checkpoint(self.folder.checkpoint)
        return hashes


def find_tree_file(port: Port) -> Path | None:
    """The file that a port reads its tree from; None for a tree that is named or written out."""
    file = port.folder / port.tree if isinstance(port.tree, str) else None
    return file if file is not None and file.is_file() else None


def _find_named_files(port: Port, fields: Collection[str]) -> dict[str, Path]:
    """Further files that some of the port's fields name."""
    prompts, captured = port.alignment.prompts, port.alignment.captured
    named: dict[str, Path | None] = {}
    if "tree" in fields:
        named["tree file"] = find_tree_file(port)
    if "alignment" in fields:
        is_file = isinstance(prompts, str) and prompts != "default"
        named["prompts file"] = port.resolve_path(prompts) if is_file else None
        named["captured file"] = (
            port.resolve_path(captured) if captured is not None and port.engine == "captured" else None
        )
    return {name: file for name, file in named.items() if file is not None}


def _fingerprint_checkpoint(folder: Path) -> str:
    """Changes with what was converted or with the files' bytes, not when the same checkpoint is written again."""
    from porting_kit.conversion.output_folder import CONFIG, RECEIPT
    from porting_kit.engine.capture_kit import digest_checkpoint

    if not (folder / CONFIG).is_file():
        return "absent"
    try:
        receipt = read_json(folder / RECEIPT)
        converted = [receipt["rules"], [file["sha256"] for file in receipt["files"]]]
    except (OSError, ValueError, KeyError, TypeError):
        converted = None
    documents = [fingerprint_path(file) for file in sorted(folder.glob("*.json")) if file.name != RECEIPT]
    return hash_value([digest_checkpoint(folder), converted, documents])


def open_port_run(
    port_file: str | Path,
    *,
    run_folder: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> PortRun:
    """Load a port file and open its run folder.

    Args:
        port_file: the YAML file.
        run_folder: where results go; `runs/<name>` under the working directory when None or empty.
        overrides: field values by (dotted) name; None values are ignored.
        defaults: fields that the port file may lack.

    Raises:
        PortFileError: the port file or an override cannot be used.
        RunFolderError: the folder belongs to something else.
    """
    port = load_port(port_file, overrides, defaults=defaults)
    use_port_family(port)
    root = Path(run_folder) if run_folder else Path(RUNS_FOLDER) / port.name
    _let_first_rank_open(root)
    return PortRun(port=port, folder=open_run_folder(root, port.name), port_file=Path(port_file).resolve())


def use_port_family(port: Port) -> None:
    """Make the family of the port's `architecture_file` known; nothing when it names none.

    Raises:
        BaseModelError: the file cannot be used.
    """
    if port.architecture_path is not None:
        use_family_file(port.architecture_path)


def _let_first_rank_open(root: Path) -> None:
    """Under torchrun the first rank makes the run folder; the others wait, or they would find it half made."""
    deadline = time.monotonic() + OPENING_SECONDS
    while os.environ.get("RANK", "0") != "0" and not (root / MARKER).is_file() and time.monotonic() < deadline:
        time.sleep(0.05)


def require_pass(outcome: StepOutcome) -> str:
    """The gate at the end of a notebook. Returns the sentence to show.

    Raises:
        VerdictFailed: the verdict is fail or refused; names the failing gate.
    """
    if outcome.verdict in (Verdict.FAIL, Verdict.REFUSED):
        raise VerdictFailed(
            f"{outcome.step}: {outcome.verdict.value}",
            expected="pass",
            found=outcome.summary,
            where=f"gate {outcome.failing_gate!r}" if outcome.failing_gate else None,
            next_step=outcome.figures.get("next_step") or "read the report: it names the failing gate",
        )
    return f"{outcome.step}: {outcome.said}"


class Stopwatch:
    """Seconds since the step began, and the outcomes that it forgot: its own and the report's, None for none."""

    def __init__(self, earlier: StepOutcome | None = None, report: StepOutcome | None = None) -> None:
        self._start = time.perf_counter()
        self.earlier, self.report = earlier, report

    @property
    def seconds(self) -> float:
        """Wall time so far, in seconds."""
        return time.perf_counter() - self._start


@contextmanager
def running_step(run: PortRun, step: str) -> Iterator[Stopwatch]:
    """Forget the step's earlier outcome and the report's, and start its clock."""
    earlier, report = _read_outcome(run, step), _read_outcome(run, STEPS[-1])
    run.folder.begin(step)
    yield Stopwatch(earlier, report if step != STEPS[-1] else None)


def _read_outcome(run: PortRun, step: str) -> StepOutcome | None:
    """The step's outcome, None also where it is damaged."""
    with suppress(RunFolderError):
        return run.folder.outcome(step)
    return None


def finish_step(run: PortRun, outcome: StepOutcome, watch: Stopwatch) -> StepOutcome:
    """Stamp time, inputs and, of what later steps rest on, the products on an outcome and write it, last.

    One that says what it said before brings back the report's outcome, which shows it.
    """
    made = describe_products(run.folder.root, outcome.products) if outcome.step in MAKES_PRODUCTS else {}
    stamped = replace(outcome, seconds=round(watch.seconds, 3), inputs=run.inputs(outcome.step), made=made)
    run.folder.finish(stamped)
    if watch.earlier is not None and watch.report is not None and stamped.says_the_same(watch.earlier):
        run.folder.finish(watch.report)
    if outcome.step in MAKES_PRODUCTS:
        _name_stale_outcomes(run)
    return stamped


def _name_stale_outcomes(run: PortRun) -> None:
    """Say which outcomes of later steps do not hold any more; whoever reads them refuses them, and damaged ones."""
    for later in RESTS_ON_PRODUCTS:
        with suppress(RunFolderError):
            outcome = run.folder.outcome(later)
            changed = outcome.changed_inputs(run.inputs(later)) if outcome else []
            if changed:
                said = f"{later}: its result is stale now, run it again; changed since: {', '.join(changed)}"
                print(said, file=sys.stderr)
