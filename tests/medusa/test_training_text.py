"""Training text: what counts as prose, and what a file of it gives back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from porting_kit.errors import EnvironmentMissing
from porting_kit.medusa.training_text import (
    TextSource,
    clean_document,
    collect_text,
    is_prose,
    read_docstrings,
    read_text,
    split_held_out,
    write_text,
)


def test_prose_is_kept_and_code_is_not():
    docstring = """Return the number of items that are in the container.

    >>> count([1, 2])
    2

    x = y + z * (a - b) / 2

    See :func:`measure` for the length of a list, and
    the ``size`` attribute for that of an array.
    """
    expected = (
        "Return the number of items that are in the container.\n"
        "See `measure` for the length of a list, and the `size` attribute for that of an array."
    )
    seen: set[bytes] = set()
    assert clean_document(docstring, seen) == expected
    assert clean_document(docstring.replace("measure", "other_name"), seen) == ""
    assert not is_prose("result = compute(alpha, beta)[0] + offset ** 2")


def test_text_files_come_back(tmp_path: Path):
    documents = [f"This is the document of number {n} in a list of them.\nIt has two lines." for n in range(300)]
    source = TextSource(python="3", packages={"a": "1"}, documents=300, characters=1, sha256="x")
    write_text(documents, source, tmp_path / "text.xz")
    assert read_text(tmp_path / "text.xz") == documents
    assert json.loads((tmp_path / "text.json").read_text())["packages"] == {"a": "1"}
    training, held_out = split_held_out(documents)
    assert sorted(training + held_out) == sorted(documents)
    assert 0 < len(held_out) < 20
    assert set(split_held_out(documents[::-1])[1]) == set(held_out)


def test_a_plain_text_file_parts_at_blank_lines(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("One line.\nIts second line.\n\n\nAnother text.\n", encoding="utf-8")
    assert read_text(file) == ["One line.\nIts second line.", "Another text."]


def test_docstrings_are_found_and_broken_files_passed_over(tmp_path: Path):
    (tmp_path / "good.py").write_text('"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """F."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    assert sorted(read_docstrings([tmp_path / "broken.py", tmp_path / "good.py"])) == ["Class.", "F.", "Module."]


def test_a_missing_package_is_named():
    with pytest.raises(EnvironmentMissing, match="no-such-package-anywhere"):
        collect_text(("no-such-package-anywhere",))
