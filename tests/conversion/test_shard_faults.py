"""A wrong cut is named: order of ranks, biases, key/value heads; anything else is described by its first value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import read_base_config
from porting_kit.conversion import convert_checkpoint, open_tensor_source, plan_conversion
from porting_kit.conversion.proof import open_ranks, prove_targets
from porting_kit.conversion.shard_faults import ShardFault, explain_failures
from tests.conversion.rule_models import raw_config, write_model
from tests.conversion.shard_changes import cut_bias_equally, deal_kv_heads, exchange_parts, repeat_bias

QKV = "transformer.layers.0.attention.qkv"
UP = "transformer.layers.1.mlp.fc.weight"


def set_value(ranks: list[dict[str, torch.Tensor]], name: str) -> None:
    ranks[1][name] = ranks[1][name].clone()
    ranks[1][name].view(torch.int16).reshape(-1)[77] ^= 1 << 3  # one bit


def explain(folder: Path, family: str, tp_size: int, change) -> tuple[ShardFault, ...]:
    """Convert, plant, prove, explain."""
    raw = raw_config(family)
    write_model(folder / "base", raw)
    convert_checkpoint(folder / "base", folder / "out", dtype="float16", tp_size=tp_size, verify=False)
    files = [folder / "out" / f"rank{rank}.safetensors" for rank in range(tp_size)]
    ranks = [load_file(file) for file in files]
    change(ranks)
    for file, tensors in zip(files, ranks, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    source = open_tensor_source(folder / "base")
    plan = plan_conversion(read_base_config(raw), source, dtype="float16", tp_size=tp_size)
    readers = open_ranks(plan, folder / "out")
    return explain_failures(plan, source, None, readers, prove_targets(plan, source, None, readers))


@pytest.mark.parametrize(
    ("family", "tp_size", "change", "name", "target"),
    [
        ("llama", 2, lambda ranks: exchange_parts(ranks, UP), "shards in another order", UP),
        ("llama", 4, lambda ranks: exchange_parts(ranks, UP), "shards in another order", UP),
        (
            "qwen2",
            2,
            lambda ranks: cut_bias_equally(ranks, f"{QKV}.bias", 2, 1, 8),
            "fused tensor cut into equal parts",
            f"{QKV}.bias",
        ),
        ("qwen2", 4, lambda ranks: deal_kv_heads(ranks, f"{QKV}.bias", 1, 8), "kv heads dealt round", f"{QKV}.bias"),
        (
            "llama",
            4,
            lambda ranks: deal_kv_heads(ranks, f"{QKV}.weight", 1, 8),
            "kv heads dealt round",
            f"{QKV}.weight",
        ),
        (
            "gptj",
            2,
            lambda ranks: repeat_bias(ranks, "transformer.layers.0.mlp.proj.bias"),
            "bias on every rank",
            "transformer.layers.0.mlp.proj.bias",
        ),
        ("llama", 2, lambda ranks: set_value(ranks, UP), "other values", UP),
    ],
)
def test_a_wrong_cut_is_named(family: str, tp_size: int, change, name: str, target: str, tmp_path: Path) -> None:
    (fault,) = explain(tmp_path, family, tp_size, change)
    assert (fault.name, fault.targets) == (name, (target,))
    assert target in fault.evidence
    assert fault.as_cause()["fix"]


def test_a_right_checkpoint_has_nothing_to_explain(tmp_path: Path) -> None:
    assert explain(tmp_path, "llama", 4, lambda ranks: None) == ()


def test_a_flipped_bit_is_placed(tmp_path: Path) -> None:
    (fault,) = explain(tmp_path, "llama", 2, lambda ranks: set_value(ranks, UP))
    assert "rank 1: 1 of 768 values differ, the first at [2, 13]" in fault.evidence
