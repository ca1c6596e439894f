"""The README's file map equals the tree: one line for each file and folder, nothing more, nothing less."""

from __future__ import annotations

import re

import pytest

# Folders whose direct children have a line each. Everything at the top has one.
LISTED = (".ci", "notebooks", "porting_kit")
UNLISTED = re.compile(r"(^|/)(__init__|__main__)\.py$")


def read_file_map(readme: str) -> list[tuple[str, str]]:
    """The paths of the map, folders with a trailing slash, and what is said of each."""
    block = re.search(r"^## File map\n+```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert block, "the README has no section 'File map' that starts with a text block"
    entries: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in block.group(1).splitlines():
        name, _, description = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip(" "))) // 2
        parents = [*parents[:depth], name]
        entries.append(("".join(parents), description.strip()))
    return entries


def expected_entries(files: tuple[str, ...]) -> set[str]:
    """What the map must list, from the tracked files."""
    entries = set()
    for file in files:
        parts = file.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
            if (depth == 1 or (depth == 2 and parts[0] in LISTED)) and not UNLISTED.search(path):
                entries.add(path)
    return entries


def find_map_problems(readme: str, files: tuple[str, ...]) -> list[str]:
    """One line for each difference between the map and the tree."""
    listed = read_file_map(readme)
    entries = dict(listed)
    expected = expected_entries(files)
    known = {"/".join(file.split("/")[:depth]) + "/" for file in files for depth in range(1, len(file.split("/")))}
    known |= set(files)
    problems = [f"{path}: not in the map" for path in sorted(expected - set(entries))]
    problems += [f"{path}: in the map, not in the tree" for path in entries if path not in known]
    problems += [f"{path}: nothing is said of it" for path, description in entries.items() if not description]
    return problems + [f"{path}: listed twice" for path in entries if [item[0] for item in listed].count(path) > 1]


def test_the_file_map_equals_the_tree(root, tracked_files):
    problems = find_map_problems((root / "README.md").read_text(encoding="utf-8"), tracked_files)
    assert not problems, "\n".join(problems)


MAP = """# A project

## File map

```text
README.md            this page
porting_kit/         the package
  port.py            the port file
  medusa/            trees
tests/               tests
  structure/         rules
```
"""
PACKAGE_FILES = ("porting_kit/__init__.py", "porting_kit/port.py", "porting_kit/medusa/tree.py")
FILES = ("README.md", *PACKAGE_FILES, "tests/structure/test_map.py")


def test_a_right_map_passes():
    assert find_map_problems(MAP, FILES) == []


@pytest.mark.parametrize(
    ("readme", "files", "problem"),
    [
        (MAP, (*FILES, "porting_kit/cli.py"), "porting_kit/cli.py: not in the map"),
        (MAP, (*FILES, "porting_kit/engine/plan.py"), "porting_kit/engine/: not in the map"),
        (MAP, (*FILES, "setup.cfg"), "setup.cfg: not in the map"),
        (MAP.replace("port.py ", "ports.py"), FILES, "porting_kit/port.py: not in the map"),
        (MAP.replace("tests/     ", "tests/\n  gone/  "), FILES, "tests/gone/: in the map, not in the tree"),
        (MAP.replace("tests/   ", "README.md  again\ntests/"), FILES, "README.md: listed twice"),
        (MAP.replace("the port file", ""), FILES, "porting_kit/port.py: nothing is said of it"),
    ],
)
def test_a_difference_is_found(readme, files, problem):
    assert problem in find_map_problems(readme, files)
