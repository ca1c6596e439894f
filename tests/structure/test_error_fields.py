"""Every error that the package raises says what was expected, what was found, where, and what to do next.

What stands in the call is looked at, not what a run makes of it: a field that is None in one branch counts as missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FIELDS = ("expected", "found", "next_step")
PATH_NAMES = {"file", "folder", "path", "where"}
"""Parameters that are a place: where a function has one, its errors name it."""


def list_kinds(trees: dict[str, ast.Module]) -> set[str]:
    """Names of PortingKitError and of every class below it."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds, count = {"PortingKitError"}, 0
    while len(kinds) > count:
        count = len(kinds)
        kinds |= {one.name for one in classes if kinds & {base.id for base in one.bases if isinstance(base, ast.Name)}}
    return kinds


def find_incomplete(trees: dict[str, ast.Module]) -> Iterator[tuple[str, int, str, set[str]]]:
    """(file, line, subject, missing fields) of every error that lacks one."""
    kinds = list_kinds(trees)
    for file, tree in trees.items():
        raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
        for function, call in list_calls(tree):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            takes_kind = name == "error" and id(call) in raised  # a reader is told which kind to raise
            given = {one.arg: one.value for one in call.keywords}
            if (name not in kinds and not takes_kind) or None in given:
                continue
            if "items" in given:
                given.setdefault("found", given["items"])
            wanted = {*FIELDS, *(("where",) if function is not None and has_place(function) else ())}
            missing = {field for field in wanted if field not in given or may_be_none(given[field])}
            if missing:
                yield file, call.lineno, read_subject(call), missing


def read_subject(call: ast.Call) -> str:
    """The first argument's source without quotation marks."""
    return ast.unparse(call.args[0]).lstrip("f").strip("'\"") if call.args else ""


def list_calls(
    tree: ast.AST, function: ast.FunctionDef | None = None
) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """Every call with the innermost function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function, node
        yield from list_calls(node, node if isinstance(node, ast.FunctionDef) else function)


def has_place(function: ast.FunctionDef) -> bool:
    parameters = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return any(one.arg in PATH_NAMES for one in parameters)


def may_be_none(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return may_be_none(value.body) or may_be_none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def read_package(root: Path, files: tuple[str, ...]) -> dict[str, ast.Module]:
    """The package's own modules, without the definitions that imitate another package."""
    own = [file for file in files if file.startswith("porting_kit/") and file.endswith(".py")]
    own = [file for file in own if "/bundled/" not in file]
    return {file: ast.parse((root / file).read_text(encoding="utf-8")) for file in own}


def test_every_error_says_what_to_do_next(root, tracked_files):
    trees = read_package(root, tracked_files)
    problems = [
        f"{file}:{line}: {subject[:60]}: lacks {', '.join(sorted(missing))}"
        for file, line, subject, missing in find_incomplete(trees)
    ]
    assert not problems, "\n".join(problems)
    assert sum(1 for tree in trees.values() for _ in list_calls(tree)) > 1000  # it looks at something


COMPLETE = 'raise TreeError("s", expected="e", found="f", where=file, next_step="n")'


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"def f(file): {COMPLETE}", None),
        ('def f(): raise TreeError("s", expected="e", found="f", next_step="n")', None),
        ('def f(): raise TreeError("s", expected="e", items=[1], next_step="n")', None),
        ('def f(file): raise TreeError("s", expected="e", found="f", next_step="n")', {"where"}),
        ('def f(): return TreeError("s", found="f", next_step="n")', {"expected"}),
        ('def f(): raise TreeError("s", expected="e", next_step="n")', {"found"}),
        ('def f(): raise Own("s", expected="e", found="f")', {"next_step"}),
        ('def f(near): raise TreeError("s", expected="e", found="f", next_step=near if near else None)', {"next_step"}),
        ('def f(error): raise error("s", expected="e", found="f")', {"next_step"}),
        ('def f(error): error("s")', None),
    ],
)
def test_an_error_that_lacks_a_field_is_found(text, missing):
    source = f"class TreeError(PortingKitError): ...\nclass Own(TreeError): ...\n{text}\n"
    found = [lacks for *_, lacks in find_incomplete({"porting_kit/tree.py": ast.parse(source)})]
    assert found == ([missing] if missing else [])
