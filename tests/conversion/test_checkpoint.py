"""Files are written under temporary names, headers first, config.json last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from porting_kit.conversion import convert_checkpoint
from porting_kit.conversion.checkpoint import RankFile, write_config
from porting_kit.errors import BaseModelError, CheckpointError
from tests.conversion.rule_models import raw_config, write_model

PLANNED = {"a": ("float16", (2, 3)), "b": ("bfloat16", (4,)), "c": ("float32", (0, 5)), "d": ("float32", ())}
VALUES = {
    "a": torch.arange(6).reshape(2, 3).half(),
    "b": torch.tensor([1.0, 2, 3, 4]).bfloat16(),
    "c": torch.empty(0, 5),
    "d": torch.tensor(7.5),
}


def test_tensors_may_arrive_in_any_order(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank0.safetensors", PLANNED)
    for name in ("d", "b", "c", "a"):
        file.write(name, VALUES[name])
        assert torch.equal(file.read_back(name), VALUES[name])
    assert not (tmp_path / "rank0.safetensors").exists()
    file.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.safetensors"]
    stored = load_file(tmp_path / "rank0.safetensors")
    assert all(torch.equal(stored[name], VALUES[name]) for name in PLANNED)
    with safe_open(tmp_path / "rank0.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_transposed_view_is_written_as_it_reads(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank0.safetensors", {"a": ("float16", (3, 2))})
    file.write("a", VALUES["a"].T)
    file.commit()
    assert torch.equal(load_file(tmp_path / "rank0.safetensors")["a"], VALUES["a"].T)


def test_a_file_with_a_gap_is_never_named(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank0.safetensors", PLANNED)
    file.write("a", VALUES["a"])
    with pytest.raises(CheckpointError, match="tensors were never written") as caught:
        file.commit()
    assert caught.value.items == ("b", "d")  # c has no bytes
    file.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank0.safetensors", PLANNED)
    with pytest.raises(CheckpointError, match="a has 24 bytes"):
        file.write("a", VALUES["a"].float())
    file.discard()


def test_config_is_replaced_whole(tmp_path: Path) -> None:
    write_config(tmp_path, {"architecture": "A", "extra": 1})
    write_config(tmp_path, {"architecture": "B"})
    assert json.loads((tmp_path / "config.json").read_text()) == {"architecture": "B"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_second_conversion_replaces_the_first(tmp_path: Path) -> None:
    """No rank of an earlier, larger run may stay behind; config.json is the last file to appear."""
    write_model(tmp_path / "base", raw_config("qwen2"))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", tp_size=4)
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out", tp_size=1)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "rank0.safetensors", "receipt.json"}
    assert [path.name for path in outcome.files] == ["rank0.safetensors", "config.json"]
    times = [path.stat().st_mtime_ns for path in outcome.files]
    assert times == sorted(times)


def test_a_release_that_cannot_run_the_ranks_is_told(tmp_path: Path) -> None:
    """Phi's class takes several ranks from 0.13.0.dev2024081300 on; one rank it always took."""
    write_model(tmp_path / "base", raw_config("phi"))
    with pytest.raises(BaseModelError, match=r"cannot express this model: .*several ranks"):
        convert_checkpoint(tmp_path / "base", tmp_path / "out", tp_size=2, release="0.11.0.dev2024062500")
    assert not (tmp_path / "out").exists()
    for tp_size, release in ((1, "0.11.0.dev2024062500"), (2, "0.13.0")):
        convert_checkpoint(tmp_path / "base", tmp_path / release, tp_size=tp_size, release=release)


@pytest.mark.parametrize("name", ["config.json", "receipt.json", "rank0.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "base", raw_config("llama"))
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / "rank1.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match="holds folders of the names that files need"):
        convert_checkpoint(tmp_path / "base", tmp_path / "out")
    assert sorted(item.name for item in (tmp_path / "out").iterdir()) == sorted([name, "rank1.safetensors"])


@pytest.mark.parametrize("place", ["out", "out/below"])
def test_a_file_in_the_place_of_the_folder_is_said_in_plain_words(tmp_path: Path, place: str) -> None:
    write_model(tmp_path / "base", raw_config("llama"))
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        convert_checkpoint(tmp_path / "base", tmp_path / place)
    assert caught.value.found.startswith("a file where a folder is needed: ")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_receipt_is_plain_json(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("qwen2"))
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out")
    receipt = json.loads(json.dumps(outcome.receipt()))
    assert receipt["verified"] == len(receipt["targets"]) == outcome.verified
    assert {entry["name"] for entry in receipt["sources"]} >= {"lm_head.weight"}
