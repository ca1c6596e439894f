"""Every family there and back: written for 1, 2 and 4 ranks, led back to the source bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import load_families, read_base_config
from porting_kit.conversion import convert_checkpoint, open_tensor_source, plan_conversion, read_head_set
from porting_kit.conversion.proof import prove_checkpoint
from porting_kit.errors import ConversionError
from tests.conversion.rule_models import RAW, head_tensors, raw_config, write_model

FAMILIES = sorted(load_families())
# Every dtype at every number of ranks; half of them, such that each of both is met, in the quick run.
QUICK = {("float32", 1), ("float16", 2), ("float32", 4)}
EVERY = [(dtype, tp_size) for dtype in ("float32", "float16") for tp_size in (1, 2, 4)]
WAYS = [way if way in QUICK else pytest.param(*way, marks=pytest.mark.slow) for way in EVERY]


def test_every_family_has_a_config() -> None:
    assert sorted(RAW) == FAMILIES


@pytest.mark.parametrize(("dtype", "tp_size"), WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_back_gives_the_source(family: str, dtype: str, tp_size: int, tmp_path: Path) -> None:
    raw = raw_config(family)
    tensors = write_model(tmp_path / "base", raw, dtype=getattr(torch, dtype))
    save_file(head_tensors(2, vocab=read_base_config(raw).vocab_size), tmp_path / "medusa_lm_head.safetensors")
    heads = read_head_set(tmp_path / "medusa_lm_head.safetensors")
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=heads, dtype=dtype, tp_size=tp_size)
    assert outcome.verified == len(outcome.targets)
    accounted = {fate.name for fate in outcome.sources if fate.targets or fate.reason}
    assert accounted >= set(tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["mapping"] == {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    for rank in range(tp_size):
        stored = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        assert {str(t.dtype) for name, t in stored.items() if "router" not in name} == {f"torch.{dtype}"}
    source = open_tensor_source(tmp_path / "base")
    plan = plan_conversion(read_base_config(raw), source, dtype=dtype, tp_size=tp_size, heads=heads)
    proof = prove_checkpoint(plan, source, heads, tmp_path / "out", workers=2)
    assert (proof.proved, proof.failures) == (len(plan.tensors), ())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("transformer.layers.1.attention.qkv.weight", lambda t: t.roll(1, 0)),
        ("transformer.layers.0.mlp.fc.weight", lambda t: t * (1 + 2**-10)),
        ("transformer.ln_f.weight", lambda t: -t),
        ("medusa_heads.1.medusa_layers.0.linear.bias", lambda t: t.roll(1, 0)),
        ("lm_head.weight", lambda t: t.roll(1, 0)),
    ],
)
def test_a_changed_file_does_not_lead_back(name: str, change, tmp_path: Path) -> None:
    """The proof must be able to fail: one tensor of one rank is changed on the disk."""
    raw = raw_config("llama")
    write_model(tmp_path / "base", raw)
    save_file(head_tensors(2), tmp_path / "medusa_lm_head.safetensors")
    heads = read_head_set(tmp_path / "medusa_lm_head.safetensors")
    convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=heads, dtype="float16", tp_size=2)
    file = tmp_path / "out" / "rank1.safetensors"
    stored = load_file(file)
    save_file({**stored, name: change(stored[name]).contiguous()}, file)
    source = open_tensor_source(tmp_path / "base")
    plan = plan_conversion(read_base_config(raw), source, dtype="float16", tp_size=2, heads=heads)
    proof = prove_checkpoint(plan, source, heads, tmp_path / "out")
    assert [failure.target for failure in proof.failures] == [name]
    assert 1 in proof.failures[0].ranks
    with pytest.raises(ConversionError, match=name):
        proof.require()


def test_pipeline_ranks_hold_their_own_layers(tmp_path: Path) -> None:
    """Layers are counted from 0 on every pipeline rank; embedding on the first, norm and output on the last."""
    tensors = write_model(tmp_path / "base", raw_config("qwen2"))
    save_file(head_tensors(1), tmp_path / "medusa_lm_head.safetensors")
    outcome = convert_checkpoint(
        tmp_path / "base", tmp_path / "out", heads=tmp_path, dtype="float32", tp_size=2, pp_size=2
    )
    stored = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(4)]
    assert outcome.config["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2}
    assert "transformer.vocab_embedding.weight" in stored[0]
    assert "transformer.vocab_embedding.weight" not in stored[2]
    assert {"lm_head.weight", "transformer.ln_f.weight", "medusa_heads.0.lm_head.weight"} <= set(stored[3])
    assert "lm_head.weight" not in stored[1]
    heads = [{name: part[name] for name in part if name.startswith("medusa_heads")} for part in stored]
    assert all(heads), "the runtime's class makes the heads on every stage and asks for their weights"
    for stage, last in ((0, 2), (1, 3)):
        assert all(torch.equal(heads[stage][name], heads[last][name]) for name in heads[last])
    norms = [part["transformer.layers.0.input_layernorm.weight"] for part in stored]
    assert torch.equal(norms[0], tensors["model.layers.0.input_layernorm.weight"])
    assert torch.equal(norms[3], tensors["model.layers.1.input_layernorm.weight"])
