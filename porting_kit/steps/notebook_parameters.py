"""The parameters cell of a notebook: reading it, and refusing names it does not declare.

The cell is the only place where a notebook takes input: exactly one cell tagged `parameters`, the first code cell,
plain typed literals with a help comment (`name: type = literal  # help`). It is read with `ast`, because
`papermill.inspect_notebook` (2.7) drops a line that holds two `=`, and papermill itself only logs an unknown name,
silently lets a notebook without a tagged cell overwrite what was passed, and takes the first of two tagged cells.

This module does not execute anything.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.errors import PortingKitError, suggest_nearest

if TYPE_CHECKING:
    from nbformat import NotebookNode

TAG = "parameters"
INJECTED_MARK = "# Parameters"
"""First line of the cell that papermill inserts (papermill.parameterize, 2.7)."""

PORT_SHORTCUTS = ("kernel", "fit", "engine", "dtype", "tree")
"""Fields of the port file that every notebook also takes as parameters of their own; empty keeps the port file's."""


class NotebookError(PortingKitError):
    """A notebook cannot be run as a function: its parameters cell, a name passed to it, or its kernel."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: `name: annotation = default  # help`."""

    name: str
    default: Any
    annotation: str
    help: str


def read_parameters(notebook: NotebookNode, where: Path | str) -> dict[str, Parameter]:
    """The parameters a notebook declares, by name.

    Raises:
        NotebookError: no tagged cell, several, not the first code cell, or a line that is no plain typed literal.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise NotebookError(
            f"notebook {_name(where)} has {len(tagged) or 'no'} cells tagged {TAG!r}",
            expected="exactly one",
            found=len(tagged),
            where=where,
            next_step=f"tag its first code cell {TAG!r} (JupyterLab: property inspector, cell tags) and save the file"
            if not tagged
            else f"keep the tag {TAG!r} on the first code cell only",
        )
    if tagged[0] is not code[0]:
        raise NotebookError(
            f"the parameters cell of {_name(where)} is not its first code cell",
            expected="the parameters before all other code",
            found=f"code cell {code.index(tagged[0]) + 1}",
            where=where,
            next_step="move it up: code before it cannot see the values that are passed",
        )
    return parse_parameters(tagged[0].source, where)


def parse_parameters(source: str, where: Path | str) -> dict[str, Parameter]:
    """Parse the text of a parameters cell. Raises NotebookError, see `read_parameters`."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise NotebookError(
            f"the parameters cell of {_name(where)} is not Python",
            expected="name: type = literal  # help",
            found=error,
            where=where,
            next_step="correct the line that the error names",
        ) from error
    comments = _comments_by_line(source)
    parameters = {}
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        name = statement.target.id if _is_typed_assignment(statement) else None
        try:
            default = ast.literal_eval(statement.value) if name else None
        except ValueError:
            name = None
        if name is None:
            raise NotebookError(
                f"the parameters cell of {_name(where)} holds something that is no plain typed literal",
                expected="name: type = literal  # help",
                found=ast.unparse(statement).splitlines()[0],
                where=where,
                next_step="move it to a later cell: a derived value would keep its default when a parameter is passed",
            )
        help_text = comments.get(statement.end_lineno or statement.lineno, "")
        parameters[name] = Parameter(name, default, ast.unparse(statement.annotation), help_text)
    return parameters


def refuse_unknown_names(given: Iterable[str], declared: Iterable[str], where: Path | str) -> None:
    """Raise NotebookError, with the nearest name, for the first given name that is not declared."""
    declared = list(declared)
    for name in given:
        if name not in declared:
            near = suggest_nearest(name, declared)
            raise NotebookError(
                f"unknown parameter {name!r}",
                expected=f"did you mean {near!r}?" if near else "one of: " + ", ".join(declared),
                found=repr(name),
                where=where,
                next_step="correct or remove it; nothing was run",
            )


def refuse_injected_typos(history: Sequence[str] | None = None) -> None:
    """For a notebook run by papermill directly: refuse names that its parameters cell does not declare.

    Args:
        history: sources of the cells executed so far; those of the running notebook (IPython's `In`) when None. The
            cell that papermill injected starts with its mark and directly follows the parameters cell. By hand there
            is none, and nothing is refused.

    Raises:
        NotebookError: an injected name that is not declared.
    """
    if history is None:
        from IPython import get_ipython

        shell = get_ipython()
        history = shell.user_ns.get("In", []) if shell else []
    for declaring, injected in pairwise(history):
        if injected.lstrip().startswith(INJECTED_MARK):
            declared = parse_parameters(declaring, "the cell tagged parameters")
            targets = [target for node in ast.parse(injected).body for target in getattr(node, "targets", ())]
            refuse_unknown_names(map(ast.unparse, targets), declared, "the cell that papermill injected")


def collect_settings(overrides: Mapping[str, Any], **shortcuts: Any) -> dict[str, Any]:
    """The overrides and the shortcuts that were given, as one dict for `open_port_run`; empty ones say nothing.

    The shortcuts are plain `str` with "" for "not given": papermill (2.7) does not recognise `str | None`.
    """
    given = {name: value for name, value in shortcuts.items() if value is not None and value != ""}
    return {**overrides, **given}


def _is_typed_assignment(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
    )


def _comments_by_line(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _name(where: Path | str) -> str:
    return Path(where).name
