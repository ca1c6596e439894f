"""A base streamed layer by layer says what the whole one says, and holds one layer at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.alignment import streamed_reference
from porting_kit.alignment.reference import load_reference
from porting_kit.alignment.streamed_reference import needs_streaming, open_streamed_reference
from porting_kit.errors import BaseModelError
from tests.alignment.tiny_ports import make_base, make_prompts


@pytest.mark.parametrize("family", ["llama", "bloom", "gptneox"])
def test_a_streamed_base_says_the_same(family: str, tmp_path: Path):
    base = make_base(tmp_path / "base", family)
    whole, streamed = load_reference(base), open_streamed_reference(base)
    prompts = make_prompts((9, 14))
    assert streamed.generate(prompts, 12) == whole.generate(prompts, 12)
    for ours, theirs in zip(streamed.logits(prompts), whole.logits(prompts), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert streamed.settings == whole.settings


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path):
    reference = open_streamed_reference(make_base(tmp_path / "base", "llama", num_hidden_layers=3))
    layers, seen = reference.model.model.layers, []

    def count(*given: object) -> None:
        seen.append(sum(not any(p.is_meta for p in layer.parameters()) for layer in layers))

    for layer in layers:
        layer.self_attn.register_forward_hook(count)
    reference.logits(make_prompts((9,)))
    assert seen == [1, 1, 1]
    assert all(parameter.is_meta for parameter in layers.parameters())


def test_a_changed_layer_shows(tmp_path: Path):
    base = make_base(tmp_path / "base", "llama")
    whole, prompts = load_reference(base), make_prompts((9,))
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[next(name for name in tensors if "layers.1.mlp.down_proj" in name)] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert not torch.allclose(open_streamed_reference(base).logits(prompts)[0], whole.logits(prompts)[0])


def test_tensors_that_the_loader_would_change_are_refused(tmp_path: Path):
    base = make_base(tmp_path / "base", "llama")
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.0.mlp.other.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="cannot be streamed") as caught:
        open_streamed_reference(base)
    assert "up_proj" in str(caught.value)


def test_little_free_memory_asks_for_streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = make_base(tmp_path / "base", "llama")
    assert not needs_streaming(base, "float32", "cpu")
    monkeypatch.setattr(streamed_reference, "find_free_bytes", lambda device: 1000)
    assert needs_streaming(base, "float32", "cpu")
    monkeypatch.setattr(streamed_reference, "find_free_bytes", lambda device: None)
    assert not needs_streaming(base, "float32", "cpu")
