"""Heads in several files are read whole, or refused with the name of the file that is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from porting_kit.cli import app
from porting_kit.conversion import convert_checkpoint, read_head_set
from porting_kit.errors import BaseModelError, HeadsError
from tests.conversion.rule_models import head_tensors, raw_config, write_model

TENSORS = head_tensors(2)


def write_shards(folder: Path, suffix: str = "safetensors", stem: str = "medusa_lm_head", *, index: bool) -> list[Path]:
    """Two shards, one head in each."""
    folder.mkdir(parents=True, exist_ok=True)
    files, weight_map = [], {}
    for number in range(2):
        file = folder / f"{stem}-0000{number + 1}-of-00002.{suffix}"
        part = {name: tensor for name, tensor in TENSORS.items() if name.startswith(f"{number}.")}
        save_file(part, file) if suffix == "safetensors" else torch.save(part, file)
        files.append(file)
        weight_map |= dict.fromkeys(part, file.name)
    if index:
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.mark.parametrize("stem", ["medusa_lm_head", "heads", "model"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_sharded_heads_are_read(index: bool, suffix: str, stem: str, tmp_path: Path) -> None:
    write_shards(tmp_path, suffix, stem, index=index)
    heads = read_head_set(tmp_path)
    assert heads.num_heads == 2
    for name, origin in heads.origins.items():
        assert torch.equal(heads.read(name), TENSORS[origin])


@pytest.mark.parametrize("stem", ["medusa_lm_head", "heads", "model"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "bin"])
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_shard_is_refused_by_name(gone: int, index: bool, suffix: str, stem: str, tmp_path: Path) -> None:
    files = write_shards(tmp_path, suffix, stem, index=index)
    files[gone].unlink()
    with pytest.raises(HeadsError, match=r"1 of the 2 shards .*missing") as caught:
        read_head_set(tmp_path)
    assert caught.value.items == (files[gone].name,)


def test_one_shard_named_by_itself_is_refused(tmp_path: Path) -> None:
    files = write_shards(tmp_path, index=True)
    with pytest.raises(HeadsError, match=r"medusa_lm_head-00001-of-00002\.safetensors is one of 2 shards") as caught:
        read_head_set(files[0])
    assert caught.value.next_step == f"name the folder: {tmp_path}"


def test_the_only_shard_there_is_makes_whole_heads(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "medusa_lm_head-00001-of-00001.safetensors")
    assert read_head_set(tmp_path).num_heads == 2
    assert read_head_set(tmp_path / "medusa_lm_head-00001-of-00001.safetensors").num_heads == 2


def test_an_index_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    """A shard holds a third head that the index does not know."""
    files = write_shards(tmp_path, index=True)
    second = {name: tensor for name, tensor in TENSORS.items() if name.startswith("1.")}
    third = {name.replace("1.", "2.", 1): tensor.clone() for name, tensor in second.items()}
    save_file(second | third, files[1])
    with pytest.raises(HeadsError, match="the shard index and the shards disagree") as caught:
        read_head_set(tmp_path)
    assert set(caught.value.items) == set(third)


def test_whole_heads_and_shards_that_differ_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, index=True)
    torch.save(TENSORS, tmp_path / "medusa_lm_head.pt")
    assert read_head_set(tmp_path).num_heads == 2
    torch.save(TENSORS | {"0.0.linear.bias": torch.zeros(32)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="hold different heads") as caught:
        read_head_set(tmp_path)
    assert caught.value.items == ("0.0.linear.bias",)


def test_several_files_that_are_no_shards_are_named(tmp_path: Path) -> None:
    for name in ("heads.pt", "optimizer.pt"):
        torch.save(TENSORS, tmp_path / name)
    with pytest.raises(HeadsError, match="the folder holds no heads") as caught:
        read_head_set(tmp_path)
    assert caught.value.found == "2 weight files and none named medusa_lm_head"
    assert caught.value.items == ("heads.pt", "optimizer.pt")


def test_a_missing_shard_of_a_base_with_merged_heads_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, stem="model", index=True)
    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen2")))
    files[1].unlink()
    with pytest.raises(HeadsError, match="shards that the index names are missing") as caught:
        read_head_set(tmp_path)
    assert caught.value.items == (files[1].name,)


def test_shards_of_heads_are_no_base(tmp_path: Path) -> None:
    write_shards(tmp_path / "heads", index=True)
    (tmp_path / "heads" / "config.json").write_text(json.dumps(raw_config("qwen2")))
    with pytest.raises(BaseModelError, match="holds Medusa heads only"):
        convert_checkpoint(tmp_path / "heads", tmp_path / "out")


def test_a_missing_shard_of_a_base_without_an_index_is_named(tmp_path: Path) -> None:
    file = write_shards(tmp_path, stem="model", index=False)[0]
    file.unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen2")))
    with pytest.raises(BaseModelError, match="1 of the 2 shards are missing") as caught:
        convert_checkpoint(tmp_path, tmp_path / "out")
    assert caught.value.items == (file.name,)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_sharded_heads_convert_as_whole_ones_do(suffix: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    write_model(base, raw_config("qwen2"))
    write_shards(tmp_path / "heads", suffix, index=suffix == "safetensors")
    outcome = convert_checkpoint(base, tmp_path / "sharded", heads=tmp_path / "heads", dtype="float32")
    save_file(TENSORS, tmp_path / "medusa_lm_head.safetensors")
    convert_checkpoint(base, tmp_path / "whole", heads=tmp_path / "medusa_lm_head.safetensors", dtype="float32")
    written = [tmp_path / name / "rank0.safetensors" for name in ("sharded", "whole")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert {fate.file for fate in outcome.sources if "linear" in fate.name and fate.name[0].isdigit()} == {
        f"medusa_lm_head-0000{number}-of-00002.{suffix}" for number in (1, 2)
    }
    port = tmp_path / "port.yaml"
    port.write_text(f"name: sharded\nbase: {base}\nheads: {tmp_path}/heads\ntrtllm: bundled\ntree: small_3\n")
    (tmp_path / "heads" / f"medusa_lm_head-00002-of-00002.{suffix}").unlink()
    result = CliRunner().invoke(app, ["convert", str(port), "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert f"medusa_lm_head-00002-of-00002.{suffix}" in result.output
