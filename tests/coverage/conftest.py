"""A small tree to break: the bundled definitions, copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from porting_kit.source_tree import open_source_tree

MakeTree = Callable[..., Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """(file below tensorrt_llm, text, replacement) ... -> root of a copy of the bundled tree with these edits."""

    def make(*edits: tuple[str, str, str]) -> Path:
        root = tmp_path / "tree"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(open_source_tree("bundled").package, root / "tensorrt_llm", ignore=ignored)
        for name, text, replacement in edits:
            file = root / "tensorrt_llm" / name
            source = file.read_text(encoding="utf-8")
            assert source.count(text) == 1, f"{name}: {text!r} is there {source.count(text)} times"
            file.write_text(source.replace(text, replacement), encoding="utf-8")
        return root

    return make
