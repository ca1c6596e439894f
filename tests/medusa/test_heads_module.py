"""The heads' module: layout, arithmetic, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from porting_kit.errors import HeadsError
from porting_kit.medusa.heads import HEADS_FILE, MedusaHeads, load_heads, save_heads

E, V, M = 8, 12, 3


def make_heads(variant: str, num_layers: int = 1) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(E, V, num_heads=M, num_layers=num_layers, variant=variant)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_tensor_names_are_the_original_projects(variant, num_layers):
    expected = {}
    for head in range(M):
        for layer in range(num_layers):
            expected[f"{head}.{layer}.linear.weight"] = (E, E)
            expected[f"{head}.{layer}.linear.bias"] = (E,)
        if variant == "v1":
            expected[f"{head}.{num_layers}.weight"] = (V, E)
    found = {name: tuple(t.shape) for name, t in make_heads(variant, num_layers).state_dict().items()}
    assert found == expected


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_logits_follow_the_written_formula(variant):
    heads, base_matrix, hidden = make_heads(variant), torch.randn(V, E), torch.randn(5, E)
    logits = heads(hidden, lambda states: states @ base_matrix.T)
    tensors = heads.state_dict()
    for head in range(M):
        inner = hidden @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"]
        states = hidden + functional.silu(inner)
        matrix = tensors[f"{head}.1.weight"] if variant == "v1" else base_matrix
        torch.testing.assert_close(logits[head], states @ matrix.T)
    # the base's own activation in place of SiLU must show: otherwise this test could not tell
    wrong = hidden + functional.gelu(inner)
    assert not torch.allclose(logits[-1], wrong @ matrix.T, atol=1e-3)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_fresh_heads_say_what_the_base_says(variant):
    heads, base_matrix, hidden = MedusaHeads(E, V, num_heads=M, variant=variant), torch.randn(V, E), torch.randn(5, E)
    heads.copy_output_matrix(base_matrix)
    logits = heads(hidden, lambda states: states @ base_matrix.T)
    torch.testing.assert_close(logits, (hidden @ base_matrix.T).expand(M, -1, -1))


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_saved_heads_come_back(tmp_path: Path, variant):
    heads = make_heads(variant, num_layers=2)
    save_heads(heads, tmp_path, base_name="some-base")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (M, 2)
    assert config["base_model_name_or_path"] == "some-base"
    back = load_heads(tmp_path)
    assert back.variant == variant
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, heads.state_dict()[name].half().float(), rtol=0, atol=0)


def test_values_that_half_precision_cannot_hold_are_refused(tmp_path: Path):
    heads = make_heads("v2")
    with torch.no_grad():
        heads[1][0].linear.weight[0, 0] = 1e6
    with pytest.raises(HeadsError, match=r"not finite(.|\n)*1\.0\.linear\.weight"):
        save_heads(heads, tmp_path, base_name="b")
    assert not (tmp_path / HEADS_FILE).exists()


def test_nan_in_a_file_is_refused(tmp_path: Path):
    save_heads(make_heads("v2"), tmp_path, base_name="b")
    tensors = load_file(tmp_path / HEADS_FILE)
    tensors["2.0.linear.bias"][3] = float("nan")
    save_file(tensors, tmp_path / HEADS_FILE)
    with pytest.raises(HeadsError, match=r"2\.0\.linear\.bias"):
        load_heads(tmp_path)


def test_a_count_that_the_tensors_contradict_is_refused(tmp_path: Path):
    save_heads(make_heads("v2"), tmp_path, base_name="b")
    config = json.loads((tmp_path / "config.json").read_text())
    config["medusa_num_heads"] = M - 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadsError, match=r"2\.0\.linear\.weight"):
        load_heads(tmp_path)


@pytest.mark.parametrize("file", ["config.json", HEADS_FILE])
def test_a_missing_file_is_refused(tmp_path: Path, file):
    save_heads(make_heads("v2"), tmp_path, base_name="b")
    (tmp_path / file).unlink()
    with pytest.raises(HeadsError, match="cannot be read"):
        load_heads(tmp_path)


@pytest.mark.parametrize("shape", [{"num_heads": 0}, {"num_heads": 1, "num_layers": 0}])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(HeadsError, match="do not exist"):
        MedusaHeads(E, V, **shape)
