"""Heads join a base checkpoint that another converter has written: the same files as converting both at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from porting_kit.conversion import add_heads, convert_checkpoint
from porting_kit.conversion.comparison import compare_checkpoints
from porting_kit.errors import CheckpointError, HeadsError
from tests.conversion.rule_models import head_tensors, raw_config, write_model


def write_both(folder: Path, **ranks: int) -> None:
    """A base checkpoint without heads, heads, and both converted at once as `whole`."""
    write_model(folder / "model", raw_config("llama"))
    save_file(head_tensors(2), folder / "medusa_lm_head.safetensors")
    convert_checkpoint(folder / "model", folder / "base", dtype="float16", **ranks)
    convert_checkpoint(folder / "model", folder / "whole", heads=folder, dtype="float16", **ranks)


@pytest.mark.parametrize("ranks", [{}, {"tp_size": 2}, {"tp_size": 2, "pp_size": 2}])
def test_joined_is_the_same_as_converted_at_once(ranks: dict[str, int], tmp_path: Path) -> None:
    """Vocabulary 37 on two ranks: base and heads are padded alike."""
    write_both(tmp_path, **ranks)
    outcome = add_heads(tmp_path / "base", tmp_path / "joined", tmp_path / "medusa_lm_head.safetensors")
    found = compare_checkpoints(tmp_path / "joined", tmp_path / "whole")
    assert found.is_same, (found.differences, found.fields)
    assert outcome.verified == len(outcome.targets)
    assert {row.kind for row in outcome.field_table if row.source} == {"kept"}


def test_heads_without_an_output_matrix_get_each_ranks_own_part(tmp_path: Path) -> None:
    write_both(tmp_path, tp_size=2)
    tensors = {name: tensor for name, tensor in head_tensors(2).items() if "linear" in name}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    add_heads(tmp_path / "base", tmp_path / "joined", tmp_path / "medusa_lm_head.safetensors")
    for rank in range(2):
        stored = load_file(tmp_path / "joined" / f"rank{rank}.safetensors")
        assert stored["medusa_heads.1.lm_head.weight"].equal(stored["lm_head.weight"])


def test_heads_of_another_base_are_refused(tmp_path: Path) -> None:
    write_both(tmp_path)
    save_file(head_tensors(2, vocab=40), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(HeadsError, match="different vocabularies"):
        add_heads(tmp_path / "base", tmp_path / "joined", tmp_path / "medusa_lm_head.safetensors")
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(num_medusa_heads=2), "holds Medusa heads already"),
        (lambda config: config.update(quantization={"quant_algo": "W4A16"}), "only join a base checkpoint in floating"),
        (lambda config: config.update(vocab_size=35), "output matrix does not fit"),
        (lambda config: config.pop("hidden_size"), "unusable hidden_size"),
        (lambda config: config["mapping"].update(tp_size=2, world_size=2), "a weight file is missing"),
        (lambda config: config["mapping"].update(tp_size=2), "unusable mapping.world_size"),
        (lambda config: config["mapping"].update(tp_size=-1, pp_size=-1), "unusable mapping.tp_size"),
        (lambda config: config["mapping"].update(tp_size="two"), "unusable mapping.tp_size"),
        (lambda config: config["mapping"].update(cp_size=2), "is for context parallelism"),
        (lambda config: config.update(quantization="FP8"), "unusable quantization"),
        (lambda config: config.update(mapping=[1]), "unusable mapping"),
        (lambda config: config.update(dtype="float8"), "unusable dtype"),
    ],
)
def test_an_unusable_base_checkpoint_is_refused(change, message: str, tmp_path: Path) -> None:
    write_both(tmp_path)
    save_file(head_tensors(2, vocab=35), tmp_path / "short.safetensors")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    change(config)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    heads = "short" if config.get("vocab_size") == 35 else "medusa_lm_head"
    with pytest.raises(CheckpointError, match=message):
        add_heads(tmp_path / "base", tmp_path / "joined", tmp_path / f"{heads}.safetensors")
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("a file", "there is no such checkpoint folder"),
        ("no folder", "there is no such checkpoint folder"),
        ("config.json is a folder", "a folder where a file is needed"),
        ("config.json is a list", "is no JSON object"),
        ("config.json is cut", "Expecting"),
    ],
)
def test_a_base_checkpoint_of_another_kind_is_refused_in_plain_words(damage: str, said: str, tmp_path: Path) -> None:
    """Names of Python's exceptions used to be the message."""
    write_both(tmp_path)
    folder, config = tmp_path / "base", tmp_path / "base" / "config.json"
    if damage in ("a file", "no folder"):
        shutil.rmtree(folder)
    else:
        config.unlink()
    if damage == "a file":
        folder.write_text("x")
    elif damage == "config.json is a folder":
        config.mkdir()
    elif damage != "no folder":
        config.write_text({"config.json is a list": "[]", "config.json is cut": "{"}[damage])
    with pytest.raises(CheckpointError) as caught:
        add_heads(folder, tmp_path / "joined", tmp_path / "medusa_lm_head.safetensors")
    assert said in caught.value.message
    assert "Error" not in caught.value.message
    assert "Errno" not in caught.value.message


def test_a_base_checkpoint_is_no_model(tmp_path: Path) -> None:
    write_both(tmp_path)
    with pytest.raises(CheckpointError, match="not a Hugging Face model") as caught:
        convert_checkpoint(tmp_path / "base", tmp_path / "out")
    assert "base_checkpoint" in str(caught.value.next_step)
