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
