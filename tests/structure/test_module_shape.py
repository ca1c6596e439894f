"""Modules are nouns of the domain, say what they are for, and stay small enough to read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LINES_AT_MOST = 400
FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
# Shaped by the API of the package that they stand in for, names and all.
IMITATION = "porting_kit/bundled/tree/"


def find_shape_problems(root: Path, files: tuple[str, ...]) -> list[str]:
    """One line for each module of the package or the tests that is too long, badly named, or without a docstring."""
    problems = []
    for file in files:
        if not file.endswith(".py") or file.startswith(IMITATION):
            continue
        text = (root / file).read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if file.startswith("porting_kit/") and lines > LINES_AT_MOST:
            problems.append(f"{file}: {lines} lines, at most {LINES_AT_MOST}")
        if {Path(part).stem for part in file.split("/")} & FORBIDDEN_STEMS:
            problems.append(f"{file}: the name does not say what is in it")
        if text.strip() and not file.startswith("tests/") and not ast.get_docstring(ast.parse(text)):
            problems.append(f"{file}: no module docstring")
    return problems


def test_modules_are_small_and_named_after_their_subject(root, tracked_files):
    problems = find_shape_problems(root, tracked_files)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("porting_kit/tree.py", '"""Trees."""\n' + "x = 1\n" * 400, "porting_kit/tree.py: 401 lines, at most 400"),
        ("porting_kit/medusa/utils.py", '"""Things."""\n', "the name does not say what is in it"),
        ("tests/common/test_tree.py", "", "the name does not say what is in it"),
        ("porting_kit/tree.py", "x = 1\n", "porting_kit/tree.py: no module docstring"),
    ],
)
def test_a_badly_shaped_module_is_found(tmp_path, file, text, problem):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    problems = find_shape_problems(tmp_path, (file,))
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_module_at_the_limit_and_an_empty_init_are_left_alone(tmp_path):
    (tmp_path / "porting_kit").mkdir()
    (tmp_path / "porting_kit/tree.py").write_text('"""Trees."""\n' + "x = 1\n" * 399)
    (tmp_path / "porting_kit/__init__.py").write_text("")
    assert find_shape_problems(tmp_path, ("porting_kit/tree.py", "porting_kit/__init__.py")) == []
