"""Heads go out in every layout and come back with the same values; files of other projects' making are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting_kit.conversion.heads import read_head_set
from porting_kit.conversion.heads_export import EXPORT_LAYOUTS, export_tensors, write_export
from porting_kit.errors import HeadsError
from tests.conversion.rule_models import head_tensors

E, V = 32, 37


def write_source(folder: Path, *, heads: int = 3, layers: int = 2, shared: bool = False):
    tensors = head_tensors(heads, layers)
    if shared:
        tensors = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    return read_head_set(folder)


def values(heads) -> dict[str, torch.Tensor]:
    return {name: heads.read(name) for name in heads.origins}


@pytest.mark.parametrize("as_pickle", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", EXPORT_LAYOUTS)
def test_every_layout_comes_back(layout: str, shared: bool, as_pickle: bool, tmp_path: Path):
    heads = write_source(tmp_path / "source", shared=shared)
    matrix = torch.randn(V, E)
    (tmp_path / "out").mkdir()
    write_export(tmp_path / "out", *export_tensors(heads, layout, lambda: matrix), as_pickle=as_pickle)
    (tmp_path / "any").touch()
    assert len({file.stat().st_mode for file in (tmp_path / "any", *(tmp_path / "out").iterdir())}) == 1
    back = read_head_set(tmp_path / "out")
    assert (back.num_heads, back.num_layers, back.hidden_size) == (3, 2, E)
    assert back.layout == EXPORT_LAYOUTS[layout]
    assert back.stated["base_model_name_or_path"] == "tiny"
    assert not any("the config says 3" in warning for warning in back.warnings)
    found, expected = values(back), values(heads)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    copied = set(found) - set(expected)
    assert copied == (
        {f"medusa_heads.{h}.lm_head.weight" for h in range(3)} if shared and layout == "tensorrt_llm" else set()
    )
    assert all(torch.equal(found[name], matrix) for name in copied)


def test_a_changed_value_shows_in_the_round_trip(tmp_path: Path):
    """Seeded fault: two heads swapped on the way out."""
    heads = write_source(tmp_path / "source")
    tensors, config = export_tensors(heads, "vllm")
    tensors["blocks.0.layers.0.weight"], tensors["blocks.1.layers.0.weight"] = (
        tensors["blocks.1.layers.0.weight"],
        tensors["blocks.0.layers.0.weight"],
    )
    (tmp_path / "out").mkdir()
    write_export(tmp_path / "out", tensors, config, as_pickle=False)
    found = values(read_head_set(tmp_path / "out"))
    assert not all(torch.equal(found[name], tensor) for name, tensor in values(heads).items())


def test_vllm_is_told_of_biases_and_of_the_shared_matrix(tmp_path: Path):
    _, own = export_tensors(write_source(tmp_path / "own"), "vllm")
    assert own["medusa_fc_bias"] is True
    assert (own["original_lm_head"], own["vocab_size"], own["truncated_vocab_size"]) == (False, V, V)
    tensors, shared = export_tensors(write_source(tmp_path / "shared", shared=True), "vllm", lambda: torch.ones(V, E))
    assert shared["original_lm_head"] is True
    assert [name for name in tensors if name.startswith("lm_heads")] == ["lm_heads.0.weight"]


@pytest.mark.parametrize("layout", ["vllm", "tensorrt_llm"])
def test_a_matrix_that_is_needed_must_be_given(layout: str, tmp_path: Path):
    with pytest.raises(HeadsError, match="these heads share the base's"):
        export_tensors(write_source(tmp_path / "source", shared=True), layout)


def test_an_unknown_layout_suggests_the_nearest(tmp_path: Path):
    with pytest.raises(HeadsError, match="did you mean 'vllm'"):
        export_tensors(write_source(tmp_path / "source"), "vlm")


def test_one_block_used_twice_is_read_as_two_layers(tmp_path: Path):
    """The original and ModelOpt repeat one block object; safetensors stores shared tensors once."""
    stored = {}
    for head in range(2):
        block = torch.randn(E, E)
        stored |= {
            f"medusa_heads.{head}.0.linear.weight": block,
            f"medusa_heads.{head}.0.linear.bias": torch.randn(E),
            f"medusa_heads.{head}.2.weight": torch.randn(V, E),
        }
    save_file(stored | {"model.norm.weight": torch.ones(E)}, tmp_path / "model.safetensors")
    config = {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 2}, "num_hidden_layers": 30, "vocab_size": V}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = read_head_set(tmp_path)
    assert (heads.layout, heads.num_heads, heads.num_layers) == ("ModelOpt", 2, 2)
    assert any("one residual block 2 times" in warning for warning in heads.warnings)
    for layer in range(2):
        name = f"medusa_heads.1.medusa_layers.{layer}.linear.weight"
        assert torch.equal(heads.read(name), stored["medusa_heads.1.0.linear.weight"])
    assert torch.equal(heads.read("medusa_heads.0.lm_head.weight"), stored["medusa_heads.0.2.weight"])


def test_modelopts_nested_counts_are_compared(tmp_path: Path):
    heads = write_source(tmp_path / "source", layers=1)
    tensors, _ = export_tensors(heads, "modelopt")
    (tmp_path / "out").mkdir()
    write_export(tmp_path / "out", tensors, {"medusa": {"num_medusa_heads": 5}}, as_pickle=False)
    assert "the config says 5 heads, the file holds 3; the file counts" in read_head_set(tmp_path / "out").warnings


@pytest.mark.parametrize("text", ["[1, 2]", '"medusa_num_heads"', "4", "null"])
def test_a_config_that_is_no_mapping_is_refused(text: str, tmp_path: Path):
    write_source(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(text)
    with pytest.raises(HeadsError, match="no mapping"):
        read_head_set(tmp_path / "source")


@pytest.mark.parametrize("value", ["4", [4], 4.0, True, {"n": 4}, -1])
@pytest.mark.parametrize("key", ["medusa_num_heads", "medusa_num_layers"])
def test_counts_that_are_no_whole_numbers_are_refused(key: str, value: object, tmp_path: Path):
    write_source(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(json.dumps({key: value}))
    with pytest.raises(HeadsError, match="no whole numbers") as caught:
        read_head_set(tmp_path / "source")
    assert caught.value.items == (f"{key}: {value!r}",)


def test_heads_that_modelopt_makes_are_read(tmp_path: Path):
    """NVIDIA ModelOpt's own Medusa mode, where it is installed: every tensor, and what the heads say."""
    speculative = pytest.importorskip("modelopt.torch.speculative", reason="needs nvidia-modelopt")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=E, intermediate_size=48, **sizes))
    speculative.convert(model, [("medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2})])
    for parameter in model.medusa_heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "made")
    heads = read_head_set(tmp_path / "made")
    assert (heads.layout, heads.num_heads, heads.num_layers) == ("ModelOpt", 3, 2)
    found = values(heads)
    hidden = torch.randn(5, E)
    for head, module in enumerate(model.medusa_heads):
        states = hidden
        for layer in range(2):
            name = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            linear = torch.nn.functional.linear(states, found[f"{name}.weight"], found[f"{name}.bias"])
            states = states + torch.nn.functional.silu(linear)
        said = torch.nn.functional.linear(states, found[f"medusa_heads.{head}.lm_head.weight"])
        torch.testing.assert_close(said, module(hidden))
