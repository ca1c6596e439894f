"""Notebooks are thin, take their input in one place, and are committed without results.

`find_contract_problems` holds the whole contract. The fixtures beside this file break one rule each and are named after
it; a fixture that nothing complains about fails its test.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

CELLS = range(12, 26)
CODE_LINES_AT_MOST = 60
CELL_LINES_AT_MOST = 12
KERNEL = "python3"
FIXTURES = Path(__file__).parent / "fixtures"
ABSOLUTE_PATH = re.compile(
    r"""(?<![\w.~/})\]-])/(?:home|root|Users|tmp|work|mnt|opt|usr|var|workspace|data)(?:/|\b)|\b[A-Z]:\\\\?\w"""
)
EXITS = {"exit", "quit", "_exit", "SystemExit"}


def count_lines(source: str) -> int:
    """Lines that are not blank."""
    return sum(1 for line in source.splitlines() if line.strip())


def find_contract_problems(notebook: dict) -> list[str]:
    """What breaks the contract, one line each."""
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [
        *find_size_problems(cells, code),
        *find_order_problems(cells, code),
        *find_parameter_problems(code),
        *find_statement_problems(code),
        *find_path_problems(cells),
        *find_result_problems(notebook, code),
    ]


def find_size_problems(cells: list[dict], code: list[dict]) -> Iterator[str]:
    """Thin by the numbers: cells, prose against code, code lines in all and per cell."""
    prose = [cell for cell in cells if cell["cell_type"] == "markdown"]
    if len(cells) not in CELLS:
        yield f"{len(cells)} cells, expected {CELLS.start} to {CELLS.stop - 1}"
    if len(prose) < len(code):
        yield f"{len(code)} code cells, only {len(prose)} of prose"
    total = sum(count_lines(text_of(cell)) for cell in code)
    if total > CODE_LINES_AT_MOST:
        yield f"{total} code lines, at most {CODE_LINES_AT_MOST}"
    for number, cell in enumerate(code, start=1):
        if (lines := count_lines(text_of(cell))) > CELL_LINES_AT_MOST:
            yield f"code cell {number}: {lines} lines, at most {CELL_LINES_AT_MOST}"


def find_order_problems(cells: list[dict], code: list[dict]) -> Iterator[str]:
    """A title first, then the one parameters cell before any other code, prose last."""
    if not (cells and cells[0]["cell_type"] == "markdown" and text_of(cells[0]).startswith("# ")):
        yield "the first cell is not a title"
    if not (cells and cells[-1]["cell_type"] == "markdown"):
        yield "the last cell does not say where the result is and what comes next"
    tagged = [index for index, cell in enumerate(code) if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells tagged parameters, expected one"
    elif tagged != [0]:
        yield "the parameters cell is not the first code cell"


def find_parameter_problems(code: list[dict]) -> Iterator[str]:
    """Each line of the parameters cell reads `name: type = literal  # help`."""
    for cell in code:
        if "parameters" not in cell["metadata"].get("tags", []):
            continue
        source = text_of(cell)
        comments = read_comments(source)
        for statement in ast.parse(source).body:
            line = source.splitlines()[statement.lineno - 1]
            if not (
                isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
            ):
                yield f"parameter without a type: {line}"
                continue
            try:
                ast.literal_eval(statement.value)
            except ValueError:
                yield f"parameter that is derived, not a literal: {line}"
            if not comments.get(statement.end_lineno or statement.lineno, "").strip("# "):
                yield f"parameter without help: {line}"
            if line.count("=") > 1 or statement.end_lineno != statement.lineno:
                yield f"parameter that papermill's inspection drops (a second '=', or several lines): {line}"


def read_comments(source: str) -> dict[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def find_statement_problems(code: list[dict]) -> Iterator[str]:
    """No magics, no definitions, no loops, no early end that would count as success."""
    for number, cell in enumerate(code, start=1):
        source = text_of(cell)
        if re.search(r"^\s*[%!]|^\s*\w+\s*=\s*[%!]", source, re.MULTILINE):
            yield f"code cell {number}: a magic or a shell command"
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                yield f"code cell {number}: a definition; it belongs in porting_kit"
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
                yield f"code cell {number}: a loop; it belongs in porting_kit"
            elif isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in EXITS:
                    yield f"code cell {number}: {name}() ends the run as if it had passed"


def find_path_problems(cells: list[dict]) -> Iterator[str]:
    """No path that exists on one machine only, in code or prose."""
    for number, cell in enumerate(cells, start=1):
        if found := ABSOLUTE_PATH.search(text_of(cell)):
            yield f"cell {number}: an absolute path: {found.group()}"


def find_result_problems(notebook: dict, code: list[dict]) -> Iterator[str]:
    """Nothing of a run is committed, and the kernel is the one every environment has."""
    if any(cell["outputs"] or cell["execution_count"] is not None for cell in code):
        yield "outputs or execution counts are committed"
    if "widgets" in notebook["metadata"]:
        yield "the state of widgets is committed"
    if (kernel := notebook["metadata"].get("kernelspec", {}).get("name")) != KERNEL:
        yield f"kernel {kernel!r}, expected {KERNEL!r}"


def text_of(cell: dict) -> str:
    """A cell's source as one string; the file may hold a list of lines."""
    return "".join(cell["source"])


def read_notebook(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def test_every_notebook_keeps_the_contract(root):
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    assert notebooks, "no notebook was found"
    problems = [
        f"{file.name}: {problem}" for file in notebooks for problem in find_contract_problems(read_notebook(file))
    ]
    assert not problems, "\n".join(problems)


def test_notebooks_are_numbered_without_gaps(root):
    numbers = [file.name[:3] for file in sorted((root / "notebooks").glob("*.ipynb"))]
    assert numbers == [f"{number:02d}_" for number in range(len(numbers))]


# Fixture name -> what must be said of it. Each breaks this one rule and no other.
BROKEN = {
    "too_few_cells": "11 cells, expected 12 to 25",
    "too_many_cells": "26 cells, expected 12 to 25",
    "more_code_than_prose": "7 code cells, only 6 of prose",
    "too_much_code": "61 code lines, at most 60",
    "cell_too_long": "code cell 2: 13 lines, at most 12",
    "title_missing": "the first cell is not a title",
    "ends_with_code": "the last cell does not say where the result is and what comes next",
    "parameters_cell_missing": "0 cells tagged parameters, expected one",
    "parameters_cell_twice": "2 cells tagged parameters, expected one",
    "parameters_after_other_code": "the parameters cell is not the first code cell",
    "parameter_without_type": "parameter without a type: heads = 3  # how many",
    "parameter_derived": "parameter that is derived, not a literal: heads: int = 1 + len('ab')  # how many",
    "parameter_without_help": "parameter without help: heads: int = 3",
    "parameter_with_second_equals_sign": "parameter that papermill's inspection drops",
    "shell_command": "code cell 2: a magic or a shell command",
    "magic": "code cell 2: a magic or a shell command",
    "function_defined": "code cell 2: a definition; it belongs in porting_kit",
    "class_defined": "code cell 2: a definition; it belongs in porting_kit",
    "loop_written": "code cell 2: a loop; it belongs in porting_kit",
    "ends_early": "code cell 2: exit() ends the run as if it had passed",
    "absolute_path_in_code": "cell 4: an absolute path: /home/",
    "absolute_path_in_prose": "cell 3: an absolute path: /tmp/",
    "outputs_committed": "outputs or execution counts are committed",
    "execution_count_committed": "outputs or execution counts are committed",
    "widget_state_committed": "the state of widgets is committed",
    "kernel_of_another_name": "kernel 'my-env', expected 'python3'",
}


def test_the_fixture_that_keeps_the_contract_passes():
    assert find_contract_problems(read_notebook(FIXTURES / "keeps_the_contract.ipynb")) == []


@pytest.mark.parametrize(
    "fixture", sorted(path.stem for path in FIXTURES.glob("*.ipynb") if not path.stem.startswith("keeps"))
)
def test_a_broken_rule_is_found(fixture):
    problems = find_contract_problems(read_notebook(FIXTURES / f"{fixture}.ipynb"))
    assert len(problems) == 1, problems
    assert BROKEN[fixture] in problems[0]


def test_every_broken_rule_has_its_fixture():
    assert {path.stem for path in FIXTURES.glob("*.ipynb")} == {*BROKEN, "keeps_the_contract"}
