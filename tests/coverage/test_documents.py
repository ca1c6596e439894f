"""What the command prints and the page made from it."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.coverage.origin import read_origin
from porting_kit.coverage.page import main as page_main
from porting_kit.source_tree import open_source_tree

KINDS = {
    "arch": str,
    "case": str,
    "status": str,
    "patched": (str, type(None)),
    "reason": (str, type(None)),
    "context_error": (float, type(None)),
    "tree_error": (float, type(None)),
    "tokens_equal": (bool, type(None)),
    "seconds": float,
}
NEOX_FILE = "models/gptneox/model.py"


def call(*arguments: str):
    return CliRunner().invoke(app, ["coverage", *arguments])


@pytest.fixture
def broken_tree(make_tree):
    """One aligned architecture, one that fails, one refused."""
    return make_tree((NEOX_FILE, "self.post_attention_layernorm(hidden_states)", "self.norm_that_is_not_there(x)"))


def test_the_document_and_the_page(broken_tree, tmp_path, capsys):
    names = ("BloomForCausalLM", "GPTNeoXForCausalLM", "MedusaForCausalLM")
    result = call("--source", str(broken_tree), *(f"--arch={name}" for name in names), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["release"], document["verdict"]) == ("bundled-1", "fail")
    assert document["covered"] == ["weights", "model code", "tree and acceptance"]
    assert document["not_covered"] == ["kernel arithmetic", "engine"]
    assert document["counts"] == {"aligned": 1, "refused": 1, "failed": 1}
    for row in document["rows"]:
        assert all(isinstance(row[key], kinds) for key, kinds in KINDS.items()), row
        assert (row["reason"] is None) == (row["status"] == "aligned")
    assert result.stderr.count("\n") >= 3, "each finished row is told"

    file, page = tmp_path / "tree.json", tmp_path / "howto" / "coverage.md"
    file.write_text(result.stdout)
    assert page_main([str(file), "--out", str(page)]) == 0
    text = page.read_text()
    assert f"| bundled-1 | checkout | {document['date']} | 1 | 1 | 1 |" in text
    assert "**F1** " in text
    assert "norm_that_is_not_there" in text
    assert re.search(r"^\| BloomForCausalLM \| bloom \| \de-0\d p \|$", text, re.MULTILINE)
    capsys.readouterr()

    file.write_text(json.dumps({"rows": []}))
    assert page_main([str(file)]) == 2
    assert "no result of the coverage command" in capsys.readouterr().err


def test_refusals_alone_do_not_fail(make_tree):
    result = call("--source", str(make_tree()), "--arch", "MedusaForCausalLM")
    assert result.exit_code == 0
    assert "0 aligned, 1 refused, 0 failed" in result.stdout
    assert "covered: nothing" in result.stdout


@pytest.mark.parametrize("arguments", [("--source", "."), ("--source", "bundled", "--arch", "BlomForCausalLM")])
def test_an_unusable_tree_or_name_is_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "SourceTreeError"


def test_the_commit_of_a_checkout_is_read_and_of_nothing_else(make_tree):
    root = make_tree()
    assert read_origin(open_source_tree(root)).commit is None
    assert read_origin(open_source_tree("bundled")).commit is None, "this repository is no TensorRT-LLM"
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "tree"], check=True)
    origin = read_origin(open_source_tree(root))
    assert len(origin.commit) == 40
    assert origin.commit_date.startswith("20")


def document_of(release: str, dtype: str, rows: list[dict]) -> dict:
    figures = {"dtype": dtype, "bound": 1e-5 if dtype == "float32" else None}
    tree = {"commit": None, "kind": "checkout"}
    shared = {"covered": ["weights"], "not_covered": ["engine"], "counts": {}, "seconds": 3.0, "date": "2026-11-30"}
    return {**shared, "release": release, "figures": figures, "tree": tree, "rows": rows}


def row_of(arch: str, error: float, bound: float, **changes) -> dict:
    row = {"arch": arch, "case": arch.lower(), "status": "aligned", "patched": "patched", "reason": None, "note": None}
    row |= {"context_error": error, "tree_error": error / 2, "bound": bound, "seconds": 1.0, "inherent": []}
    return {**row, "sharded": [], **changes}


def test_parts_half_precision_and_ranks_on_the_page(tmp_path):
    run = {"ranks": "tp 2", "status": "aligned", "reason": None, "context_error": 3e-7, "tree_error": 2e-7}
    refused = {
        **run,
        "ranks": "pp 2",
        "status": "refused",
        "reason": "TensorRT-LLM 0.9.0 cannot",
        "context_error": None,
    }
    documents = {
        "first": document_of("0.9.0", "float32", [row_of("A", 1e-7, 1e-5, sharded=[run, refused])]),
        "second": document_of("0.9.0", "float32", [row_of("B", 2e-7, 1e-5), row_of("A", 9e-7, 1e-5)]),
        "half": document_of("0.9.0", "float16", [row_of("A", 2e-3, 8e-3), row_of("B", 1e-3, 8e-3)]),
    }
    files = []
    for name, document in documents.items():
        files.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    assert page_main([*files, "--out", str(page)]) == 0
    text = page.read_text()
    assert "| 0.9.0 | checkout | 2026-11-30 | 2 | 0 | 0 | 6 | 1 |" in text, "parts of one tree are one line"
    assert "| A | a | 1e-07 p |" in text, "a row that two parts measured is the first one's"
    assert "| 0.9.0 | float16 | 2 | 0 | 0 | 2.0e-03 (A, bound 8.0e-03) | 0.25 | 0.25 |" in text
    assert "| 0.9.0 | float32 | tp 2 | 1 | 0 | 0 | 3.0e-07 |" in text
    assert "- refused on pp 2: this release cannot – A" in text
    assert page_main([files[-1], "--out", str(page)]) == 2, "the matrix needs float32"
