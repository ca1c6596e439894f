"""Model definitions without their tree: patched, checked, told on the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from porting_kit.coverage import single_files
from porting_kit.coverage.single_files import main, patch_single_files
from porting_kit.coverage.tables import single_files_table
from porting_kit.errors import PortFileError
from porting_kit.source_tree import open_source_tree


@pytest.fixture
def folder(tmp_path):
    """A file to patch, one that accepts, one that no patch can help, one that is no Python."""
    models = open_source_tree("bundled").package / "models"
    neox = (models / "gptneox" / "model.py").read_text(encoding="utf-8")
    texts = {
        "gptneox": neox,
        "llama": (models / "llama" / "model.py").read_text(encoding="utf-8"),
        "stateful": neox.replace(
            "attention_params=None,\n    ):\n", "attention_params=None, conv_state=None\n    ):\n", 1
        ),
        "torn": neox[: len(neox) // 2] + "(",
    }
    for family, text in texts.items():
        file = tmp_path / "abc123" / "tensorrt_llm" / "models" / family / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def test_each_file_has_its_outcome(folder, capsys):
    assert main([str(folder)]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["family"]: row for row in document["single_files"]}
    assert {family: row["status"] for family, row in rows.items()} == {
        "gptneox": "patched",
        "llama": "already_accepts",
        "stateful": "refused",
        "torn": "failed",
    }
    assert rows["gptneox"]["found"] == ["missing parameter", "not passed"]
    assert "recurrent state" in rows["stateful"]["reason"]
    assert "SyntaxError" in rows["torn"]["reason"] or "parse" in rows["torn"]["reason"]
    page = single_files_table([document])
    assert page.startswith("4 files: 1 patched, 1 already accepts, 1 refused, 1 failed.")
    assert "| gptneox | abc123 | patched | missing parameter, not passed | – |" in page


def test_a_patch_that_leaves_a_gap_fails(folder, monkeypatch):
    own = single_files.patch_model_source
    forget = lambda source, **options: replace(own(source, **options), source=source)  # noqa: E731 - one use
    monkeypatch.setattr(single_files, "patch_model_source", forget)
    rows = {row["family"]: row for row in patch_single_files(folder)["single_files"]}
    assert rows["gptneox"]["status"] == "failed"
    assert "does not pass every argument on" in rows["gptneox"]["reason"]


def test_a_folder_without_files_is_the_users_mistake(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no model definitions there" in capsys.readouterr().err
    with pytest.raises(PortFileError):
        patch_single_files(tmp_path)
