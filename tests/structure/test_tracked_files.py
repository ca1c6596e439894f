"""What is committed names no machine and no package index, stays small, and holds no leftovers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DATA_BYTES_AT_MOST = 24 * 1024 * 1024
SOURCE_SUFFIXES = {"", ".py", ".md", ".ipynb", ".toml", ".yml", ".yaml", ".cfg", ".sh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".txt", ".json", ".html", ".patch"}
MACHINE_PATH = re.compile(r"(?<![\w.~/})-])/(?:home|root|Users|tmp|work|mnt|workspace)/[\w.-]+")
PACKAGE_INDEX = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs|download\.pytorch\.org|(?:deb|security)\.debian\.org|"
    r"archive\.ubuntu\.com|(?:conda|repo)\.anaconda\.(?:org|com)|pypi\.nvidia\.com)\b"
)
LEFTOVER = re.compile(
    r"(^|/)(__pycache__|\.ipynb_checkpoints|\.venv|runs|build|dist)/|\.(pyc|orig|rej|swp|log)$|(^|/)\.DS_Store$"
)
# These files hold the patterns themselves, as faults that the checks must find.
OWN_FAULTS = "tests/structure/"


def find_text_problems(root: Path, files: tuple[str, ...]) -> list[str]:
    """One line for each absolute path of a machine and each package index named in a text file."""
    problems = []
    for file in files:
        if file.startswith(OWN_FAULTS) or Path(file).suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate((root / file).read_text(encoding="utf-8").splitlines(), start=1):
            for what, pattern in (("path of one machine", MACHINE_PATH), ("package index", PACKAGE_INDEX)):
                if found := pattern.search(line):
                    problems.append(f"{file}:{number}: {what}: {found.group()}")
    return problems


def find_size_problems(sizes: dict[str, int]) -> list[str]:
    """One line when the data files are too large together, naming the largest; one for each leftover."""
    data = {file: size for file, size in sizes.items() if Path(file).suffix not in SOURCE_SUFFIXES}
    problems = [f"{file}: a leftover of a run" for file in sizes if LEFTOVER.search(file)]
    if (total := sum(data.values())) > DATA_BYTES_AT_MOST:
        largest = ", ".join(sorted(data, key=data.__getitem__, reverse=True)[:5])
        problems.append(f"{total} bytes of data, at most {DATA_BYTES_AT_MOST}; largest: {largest}")
    return problems


def test_no_file_names_a_machine_or_a_package_index(root, tracked_files):
    problems = find_text_problems(root, tracked_files)
    assert not problems, "\n".join(problems)


def test_data_files_are_small_and_nothing_is_left_over(root, tracked_files):
    problems = find_size_problems({file: (root / file).stat().st_size for file in tracked_files})
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("see /home/ada/models", "a.md:1: path of one machine: /home/ada"),
        ("x\nopen('/tmp/out.npy')", "a.md:2: path of one machine: /tmp/out.npy"),
        ("pip install -i https://pypi.org/simple x", "a.md:1: package index: pypi.org"),
    ],
)
def test_a_machine_or_an_index_is_found(tmp_path, text, problem):
    (tmp_path / "a.md").write_text(text)
    assert find_text_problems(tmp_path, ("a.md",)) == [problem]


@pytest.mark.parametrize("text", ["runs/demo/a.html", "{tmp_path}/tmp/x", "~/work/x", "docs.example.org/home/page"])
def test_other_paths_are_left_alone(tmp_path, text):
    (tmp_path / "a.md").write_text(text)
    assert find_text_problems(tmp_path, ("a.md",)) == []


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"a.safetensors": 20 << 20, "b.npy": 5 << 20}, "26214400 bytes of data"),
        ({"notebooks/.ipynb_checkpoints/a.ipynb": 1}, "a leftover of a run"),
        ({"runs/demo/run.json": 1}, "a leftover of a run"),
        ({"a.py.orig": 1}, "a leftover of a run"),
    ],
)
def test_too_much_data_and_leftovers_are_found(sizes, problem):
    problems = find_size_problems(sizes)
    assert len(problems) == 1
    assert problem in problems[0]
