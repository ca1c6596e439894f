"""The how-to pages name only commands, options, modules and files that exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer
import yaml

from porting_kit.cli import app
from porting_kit.medusa.tree import read_tree
from porting_kit.port import known_field_names, make_port

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "notebooks" / "howto").glob("*.md"))
COMMANDS = typer.main.get_command(app).commands
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def find_page_problems(text: str) -> list[str]:
    """One line for everything in a page that does not exist."""
    problems = []
    for line in re.findall(r"porting-kit [^`\n]*", text):
        words = line.split()
        command = COMMANDS.get(words[1])
        if command is None:
            problems.append(f"no command {words[1]!r}")
            continue
        # A group's command is its second word.
        command = getattr(command, "commands", {}).get((words[2:] or [""])[0], command)
        known = {option for parameter in command.params for option in parameter.opts}
        problems += [f"no option {word}" for word in words if word.startswith("-") and word not in known]
        names = re.findall(r"-p ([\w.]+)=", line)
        problems += [f"no field {name}" for name in names if name not in known_field_names()]
    for language, block in BLOCK.findall(text):
        if language == "python":
            problems += find_import_problems(block)
    links = re.findall(r"\]\(\.\./([^)]+)\)", text)
    # The site puts its own pages beside the notebooks.
    folders = (ROOT / "notebooks", ROOT / "notebooks" / "site")
    problems += [f"no file {link}" for link in links if not any((folder / link).is_file() for folder in folders)]
    return problems


def find_import_problems(source: str) -> list[str]:
    """Names that a snippet imports and that are not there."""
    return [
        f"no {node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not hasattr(importlib.import_module(node.module), alias.name)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_only_what_exists(page):
    assert find_page_problems(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run `porting-kit aling PORT.yaml`", "no command 'aling'"),
        ("`porting-kit build PORT.yaml --plan`", "no option --plan"),
        ("`porting-kit heads check PORT.yaml --layout vllm`", "no option --layout"),
        ("`porting-kit run PORT.yaml -p dtyp=float16`", "no field dtyp"),
        ("[x](../07_more.ipynb)", "no file 07_more.ipynb"),
        ("```python\nfrom porting_kit.port import load_ports\n```\n", "no porting_kit.port.load_ports"),
    ],
)
def test_what_does_not_exist_is_found(text, problem):
    assert find_page_problems(text) == [problem]


def test_the_port_file_of_the_first_page_is_one(tmp_path):
    page = (ROOT / "notebooks" / "howto" / "getting_started.md").read_text(encoding="utf-8")
    (block,) = [text for language, text in BLOCK.findall(page) if language == "yaml"]
    assert make_port(yaml.safe_load(block), folder=tmp_path).fit == "auto"


def read_step_table(page: str) -> list[tuple[list[int], int, list[int], str, int]]:
    """Node, position offset, rows seen, mask row and packed mask of each row of the worked step."""
    rows = re.findall(r"^\| \d+ \| `(\[.*?\])` \| .*? \| (\d) \| ([\d, ]+) \| `(\d+)` \| (\d+) \|$", page, re.MULTILINE)
    return [
        (ast.literal_eval(node), int(offset), [int(row) for row in seen.split(",")], mask, int(packed))
        for node, offset, seen, mask, packed in rows
    ]


def find_step_problems(page: str) -> list[str]:
    """Rows of the worked step that are not what the code makes of its tree."""
    (choices,) = re.findall(r"^tree = read_tree\((.*)\)$", page, re.MULTILINE)
    tree = read_tree(ast.literal_eval(choices))
    mask = tree.mask.int().tolist()
    expected = [
        (list(node), len(node), [row for row, seen in enumerate(mask[place]) if seen], "".join(map(str, mask[place])))
        for place, node in enumerate(tree.nodes)
    ]
    expected = [(*row, *packed) for row, packed in zip(expected, tree.packed_mask.tolist(), strict=True)]
    assert [row[1] for row in expected] == tree.position_offsets.tolist()
    found = read_step_table(page)
    problems = [f"row {place}" for place, row in enumerate(expected) if place >= len(found) or found[place] != row]
    return problems + ([f"{len(found)} rows"] if len(found) != len(expected) else [])


CONCEPTS = (ROOT / "notebooks" / "howto" / "concepts.md").read_text(encoding="utf-8")


def test_the_worked_step_is_what_the_code_does():
    assert find_step_problems(CONCEPTS) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("`11001` | 19 |", "`11001` | 18 |", "row 4"),
        ("| 0, 2 | `10100`", "| 0, 1, 2 | `10100`", "row 2"),
        ("[0, 0], [0, 1]])", "[0, 0]])", "5 rows"),
    ],
)
def test_a_slip_in_the_worked_step_is_found(right, wrong, problem):
    assert problem in find_step_problems(CONCEPTS.replace(right, wrong))


DEFAULT_WORDS = {"heads.use": "all", "alignment.batch_sizes": "chosen", "alignment.near_tie_tolerance": "measured"}
SHORT_FORMS = {"target.sm", "target.tp", "target.pp"}


def find_field_problems(page: str) -> list[str]:
    """Fields of the port file that the reference lacks, has too much, or gives another default."""
    stated = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", page, re.MULTILINE))
    port = make_port({"name": "a", "base": "b", "heads": "c"}, folder=ROOT)
    names = set(known_field_names()) - SHORT_FORMS
    leaves = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    expected = {}
    for name in leaves:
        section, _, field = name.rpartition(".")
        value = getattr(getattr(port, section) if section else port, field)
        word = DEFAULT_WORDS.get(name, "none") if value is None else f"`{value}`"
        expected[name] = "required" if name in ("name", "base", "heads.path") else word
    return sorted(name for name in {*stated, *expected} if stated.get(name) != expected.get(name))


FIELDS = (ROOT / "notebooks" / "site" / "port-file.md").read_text(encoding="utf-8")


def test_the_reference_names_every_field_with_its_default():
    assert find_field_problems(FIELDS) == []
    assert all(f"`{name}`" in FIELDS for name in SHORT_FORMS)


@pytest.mark.parametrize(
    ("right", "wrong", "problems"),
    [
        ("| `heads.use` |", "| `heads.used` |", ["heads.use", "heads.used"]),
        ("| `fit` | `off` |", "| `fit` | `auto` |", ["fit"]),
    ],
)
def test_a_field_that_is_wrong_in_the_reference_is_found(right, wrong, problems):
    assert find_field_problems(FIELDS.replace(right, wrong)) == problems
