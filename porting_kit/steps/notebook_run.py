"""One notebook as a function: finding it, checking its kernel, executing it with papermill under a time limit.

The executed file stays in the run folder whatever happens, with the reason on top when it stopped early.
This module does not know verdicts; `workbook` compares how a notebook ended with what its step left behind.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit import errors
from porting_kit.errors import EnvironmentMissing, PortingKitError
from porting_kit.run_folder import STEPS, RunFolder
from porting_kit.steps.notebook_parameters import NotebookError, Parameter, read_parameters

if TYPE_CHECKING:
    from nbformat import NotebookNode

KERNEL_START_LIMIT_S = 120
QUIET_KERNEL = "--IPKernelApp.log_level=50"
"""ipykernel 7 warns on every start that its local sockets are plain TCP; that is not for this program's log."""


@dataclass(frozen=True)
class Notebook:
    """One notebook of the workbook. Its two-digit number is its step's place in `run_folder.STEPS`."""

    file: Path
    step: str
    parameters: dict[str, Parameter]


@dataclass(frozen=True)
class NotebookFailure:
    """How a notebook stopped: the error's class name and message, as its kernel gave them."""

    name: str
    message: str

    @property
    def headline(self) -> str:
        """The first line of the message, or the name when there is none."""
        return next(iter(self.message.strip().splitlines()), self.name)

    @property
    def error_class(self) -> type[PortingKitError] | None:
        """The class of this package's own errors, None for any other exception."""
        found = getattr(errors, self.name, None)
        return found if isinstance(found, type) and issubclass(found, PortingKitError) else None


def find_notebooks(folder: str | Path | None = None) -> list[Notebook]:
    """The workbook's notebooks, `NN_name.ipynb`, with their parameters read and checked.

    Raises:
        NotebookError: none there, a number without a step, a number twice, or a wrong parameters cell.
    """
    import nbformat

    folder = Path(folder) if folder is not None else notebooks_folder()
    files = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not files:
        raise NotebookError(
            "no notebooks found",
            expected="files named NN_name.ipynb",
            found="none",
            where=folder,
            next_step="name the folder of the project's notebooks",
        )
    notebooks: list[Notebook] = []
    for file in files:
        number = int(file.name[:2])
        if number >= len(STEPS) or any(item.step == STEPS[number] for item in notebooks):
            raise NotebookError(
                f"notebook {file.name} has no step of its own",
                expected=", ".join(f"{place:02d} {step}" for place, step in enumerate(STEPS)),
                found=f"number {file.name[:2]}",
                where=file,
                next_step="renumber it, or move it out of the folder",
            )
        notebooks.append(Notebook(file, STEPS[number], read_parameters(nbformat.read(file, as_version=4), file)))
    return notebooks


def notebooks_folder() -> Path:
    """The project's notebooks: beside the package in a checkout, inside it when installed."""
    package = Path(errors.__file__).parent
    checkout, installed = package.parent / "notebooks", package / "_notebooks"
    return checkout if checkout.is_dir() else installed


def check_kernel(kernel_name: str) -> None:
    """Raise EnvironmentMissing when Jupyter knows no kernel of this name."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    manager = KernelSpecManager()
    try:
        manager.get_kernel_spec(kernel_name)
    except NoSuchKernel as error:
        known = ", ".join(sorted(manager.find_kernel_specs())) or "none"
        raise EnvironmentMissing(
            f"no Jupyter kernel {kernel_name!r} here",
            expected=repr(kernel_name),
            found=known,
            next_step=f"register this Python as one: {sys.executable} -m ipykernel install --user --name {kernel_name}",
        ) from error


def execute_notebook(
    notebook: Notebook,
    folder: RunFolder,
    parameters: Mapping[str, Any],
    kernel_name: str,
    limit_s: float,
    *,
    show_cells: bool,
) -> NotebookFailure | None:
    """Execute one notebook into its step's folder; the executed file stays there whatever happens.

    Returns:
        None when every cell ran, otherwise how it stopped.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    target = executed_file(folder, notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    deadline = time.monotonic() + limit_s
    bar = {"desc": notebook.file.stem, "leave": False, "file": sys.stderr, "disable": None}
    try:
        executed = papermill.execute_notebook(
            notebook.file,
            target,
            parameters=dict(parameters),
            kernel_name=kernel_name,
            language="python",
            progress_bar=bar if show_cells else False,
            start_timeout=KERNEL_START_LIMIT_S,
            extra_arguments=[QUIET_KERNEL],
            timeout_func=lambda cell: max(deadline - time.monotonic(), 0.01),
        )
    except PapermillExecutionError as error:
        return NotebookFailure(error.ename, _without_colours(error.evalue))
    except CellTimeoutError:
        failure = NotebookFailure("TimeLimit", f"notebook {notebook.file.name} took more than {limit_s:g} s")
    except Exception as error:  # whatever it is, the report has to be written: a dead kernel, one that never answered
        name = "KernelDied" if isinstance(error, DeadKernelError) else type(error).__name__
        failure = NotebookFailure(name, str(error).strip() or name)
    else:
        if not _left_early(executed):
            return None
        failure = NotebookFailure("SystemExit", f"a cell of {notebook.file.name} left through sys.exit")
    mark_notebook(target, failure)
    return failure


def executed_file(folder: RunFolder, notebook: Notebook) -> Path:
    return folder.step(notebook.step) / notebook.file.name


def mark_notebook(file: Path, failure: NotebookFailure) -> None:
    """Put the reason on top of an executed notebook, where papermill itself leaves none (time limit, dead kernel)."""
    import nbformat

    if not file.is_file():
        return
    notebook = nbformat.read(file, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(f"**This run stopped: {failure.message}** ({failure.name})"))
    nbformat.write(notebook, file)


def _left_early(executed: NotebookNode) -> bool:
    """Whether a cell raised SystemExit: papermill takes `sys.exit(0)` for success and skips the rest."""
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    return any(output.output_type == "error" and output.ename == "SystemExit" for output in outputs)


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
