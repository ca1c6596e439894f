"""The run folder: where each step reads and writes, and how a half-written or stale result is told from a good one.

Layout of `runs/<name>/`: `run.json` (the port that owns the folder), one folder a step with `outcome.json` and the
executed notebook, and the products: `patched/`, `checkpoint/`, `engine/`, `alignment/`, `report.html`.

Everything is written to a temporary name and renamed. A step's outcome is removed before the step starts and written
last, so a run that dies leaves no outcome. Those of later steps stay: their inputs tell whether they still hold. This
module does not know what the steps compute.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from porting_kit.errors import PortingKitError, RunFolderError
from porting_kit.outcomes import StepOutcome
from porting_kit.products import find_edits

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
DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
DISK_ERRORS |= {errno.EFBIG: "a file grew beyond what the file system or the process may write"}


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
            raise _unwritable(self.root, error) from error

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
            raise _unwritable(root, error) from error
    return RunFolder(root)


def _unwritable(path: Path, error: Exception) -> RunFolderError:
    if (number := _find_number(error)) in DISK_ERRORS:
        there = next(folder for folder in path.parents if folder.exists())
        return RunFolderError(
            DISK_ERRORS[number],
            expected="room for what is written",
            found=f"{shutil.disk_usage(there).free / 2**20:.1f} MiB free",
            where=path,
            next_step="make room and run again, or name another folder",
        )
    return RunFolderError(
        "the output folder cannot be written",
        expected="a folder that can be written into",
        found=explain_problem(error),
        where=path,
        next_step="name another folder with --out",
    )


def _find_number(error: BaseException | None) -> int | None:
    """What the system refused, by its number: torch hides it in the context of an error, safetensors in the text."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            return int(found[1])
        error = error.__context__
    return None


def require_writable(folder: Path) -> Path:
    """Make a folder, and prove that files can be written into it, before work is done for it.

    Raises:
        RunFolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _unwritable(folder, error) from error


def _read_owner(marker: Path) -> object:
    try:
        return read_json(marker).get("port")
    except (ValueError, AttributeError):
        return "an unreadable run.json"


def require_free(folder: Path) -> None:
    """Raise RunFolderError unless a folder to write into is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(
            "the output folder is occupied",
            expected="a new or empty folder",
            found="files in it" if folder.is_dir() else "a file",
            where=folder,
            next_step="name another",
        )


@contextlib.contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target`; on success it takes target's place, on failure it is removed.

    The earlier content stays until the new one is complete. Of a link its target is replaced, and the link stays.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _name_beside(target)
        temporary.mkdir()
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        yield temporary
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, PortingKitError):
            raise error.moved(temporary, target) from error
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise _unwritable(target, error) from error
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a folder its name, in place of what has it; of two processes that do so at once the later one's stays."""
    old = _name_beside(target)
    while True:
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        try:
            temporary.rename(target)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if old.exists():
                    old.rename(target)
                raise _unwritable(target, error) from error
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; the file written there takes path's place, on failure it is removed.

    Raises:
        RunFolderError: the folder cannot be written, or the disk is full.
    """
    temporary = _name_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, Exception) and _find_number(error) is not None:
            raise _unwritable(path, error) from error
        raise


def _name_beside(path: Path) -> Path:
    """A hidden name in the same folder that nobody else takes. tempfile's own files and folders are for one user."""
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")


def write_text(path: Path, text: str) -> None:
    """Write a whole file: temporary name, flush to disk, rename. Raises RunFolderError, see `replace_file`."""
    with replace_file(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole safetensors file that may be read by whoever may read any other file here.

    The package itself makes files for one user alone (safetensors 0.8.0). Raises RunFolderError, see `replace_file`.
    """
    from safetensors.torch import save_file

    with replace_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(dict(tensors), temporary, metadata=None if metadata is None else dict(metadata))
        temporary.chmod(mode)


def write_pickle(path: Path, content: Any) -> None:
    """Write a whole file as torch saves it. Raises RunFolderError, see `replace_file`."""
    import torch

    # given a path, torch says nothing of why it could not write
    with replace_file(path) as temporary, temporary.open("xb") as stream:
        torch.save(content, stream)


def explain_problem(problem: Exception) -> str:
    """What the system or a parser refused, in words for a message."""
    if not isinstance(problem, OSError):
        return str(problem)
    kinds = {
        FileExistsError: "a file where a folder is needed",
        NotADirectoryError: "a file where a folder is needed",
        IsADirectoryError: "a folder where a file is needed",
        FileNotFoundError: "no such file",
        PermissionError: "no permission",
    }
    said = kinds.get(type(problem)) or problem.strerror or type(problem).__name__
    return said if problem.filename is None else f"{said}: {problem.filename}"


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, no JSON, or nested deeper than the parser goes.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document the same way."""
    write_text(path, json.dumps(document, indent=2, default=str) + "\n")
