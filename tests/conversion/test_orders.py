"""Orders of rows on hand-labelled integers: a wrong order shows in the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from porting_kit.architectures import operations as ops
from porting_kit.architectures.rules import QKV
from porting_kit.conversion import convert_checkpoint
from porting_kit.conversion.apply import apply_operations, invert_operations
from porting_kit.conversion.sharding import shard_slices
from tests.conversion.rule_models import random_tensors, raw_config, read_base_config, write_model

# three heads of size 2, stored head by head: q k v, q k v, q k v. The label says kind (q 1, k 2, v 3), head, row.
HEAD_BY_HEAD = [100, 101, 200, 201, 300, 301, 110, 111, 210, 211, 310, 311, 120, 121, 220, 221, 320, 321]
Q_K_V = [100, 101, 110, 111, 120, 121, 200, 201, 210, 211, 220, 221, 300, 301, 310, 311, 320, 321]
# two groups of two query heads of size 1 with one key and one value each
GROUP_BY_GROUP = [100, 110, 200, 300, 120, 130, 210, 310]
GROUPS_APART = [100, 110, 120, 130, 200, 210, 300, 310]


def column(labels: list[int]) -> torch.Tensor:
    """One label a row."""
    return torch.tensor(labels)[:, None].float()


def labels(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().int().tolist()


CASES = {
    "head by head": (ops.Ungroup("H", ("1", "1", "1")), {"H": 3, "D": 2}, HEAD_BY_HEAD, Q_K_V),
    "group by group": (
        ops.Ungroup("K", ("H//K", "1", "1")),
        {"H": 4, "K": 2, "D": 1},
        GROUP_BY_GROUP,
        GROUPS_APART,
    ),
    "put together again": (ops.Group("H", ("1", "1", "1")), {"H": 3, "D": 2}, Q_K_V, HEAD_BY_HEAD),
    "halves": (ops.ReorderBlocks((1, 0)), {}, [1, 2, 3, 4], [3, 4, 1, 2]),
    "three blocks": (ops.ReorderBlocks((2, 0, 1)), {}, [1, 2, 3], [3, 1, 2]),
    "skipped rows": (ops.SkipRows(2), {}, [9, 9, 1, 2], [1, 2]),
    "second half": (ops.Take(("I", "I"), 1), {"I": 2}, [1, 2, 3, 4], [3, 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_move_as_labelled(name: str) -> None:
    operation, dims, before, after = CASES[name]
    assert labels(apply_operations([operation], [column(before)], 1, dims, {})) == after


@pytest.mark.parametrize("name", ["head by head", "group by group", "put together again", "halves", "three blocks"])
def test_the_way_back_restores_the_labels(name: str) -> None:
    operation, dims, before, after = CASES[name]
    (back,) = invert_operations([operation], column(after), [(len(before), 1)], 1, dims, {})
    assert labels(back) == before


def test_matrices_are_multiplied() -> None:
    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    product = apply_operations([ops.Product()], [first, second], 2, {}, {})
    assert labels(product) == [201, 2010, 403, 4030]
    turned = apply_operations([ops.Product(transposed=True)], [first.half(), second.T.half()], 2, {}, {})
    assert labels(turned) == labels(product)
    assert turned.dtype == torch.float32


def test_experts_are_joined_part_by_part_and_stacked() -> None:
    """Two experts of [up; gate]: 11 12 | 21 22 is up and gate of expert 0, then of expert 1."""
    parts = [column([1]), column([2]), column([3]), column([4])]
    operations = (ops.Concatenate(0), ops.Stack())
    stacked = apply_operations(operations, parts, 2, {}, {})
    assert stacked.tolist() == [[[1], [2]], [[3], [4]]]
    back = invert_operations(operations, stacked, [(1, 1)] * 4, 2, {}, {})
    assert [int(part) for part in back] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tp_size", "rank", "wanted"),
    [
        (2, 0, [0, 1, 2, 3, 8, 9, 12, 13]),
        (2, 1, [4, 5, 6, 7, 10, 11, 14, 15]),
        (4, 0, [0, 1, 8, 9, 12, 13]),
        (4, 1, [2, 3, 8, 9, 12, 13]),
        (4, 3, [6, 7, 10, 11, 14, 15]),
    ],
)
def test_each_rank_gets_its_own_heads(tp_size: int, rank: int, wanted: list[int]) -> None:
    """Four query heads on two key/value heads of size 2; on four ranks each key/value head serves two of them."""
    slices = shard_slices(QKV, 16, {"H": 4, "K": 2, "D": 2}, tp_size, rank)
    assert [row for start, stop in slices for row in range(start, stop)] == wanted


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads neither divide by 4 ranks"):
        shard_slices(QKV, 18, {"H": 12, "K": 3, "D": 1}, 4, 0)


@pytest.mark.parametrize(("tp_size", "counts"), [(1, (32, 16, 16)), (2, (16, 8, 8)), (4, (8, 8, 8))])
def test_unequal_biases_are_fused_in_order(tp_size: int, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Biases q 1, k 2, v 3 of 32, 16 and 16 rows: three equal parts would mix them."""
    raw = raw_config("qwen2")
    tensors = random_tensors(read_base_config(raw))
    for number, part in enumerate("qkv", start=1):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"].fill_(number)
    write_model(tmp_path / "base", raw, tensors)
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float32", tp_size=tp_size)
    for rank in range(tp_size):
        stored = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        wanted = [number for number, count in enumerate(counts, start=1) for _ in range(count)]
        assert labels(stored["transformer.layers.1.attention.qkv.bias"]) == wanted


@pytest.mark.parametrize("family", ["gptj", "falcon"])
def test_a_bias_summed_over_ranks_is_written_once(family: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "base", raw_config(family))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float32", tp_size=2)
    first, second = (load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(2))
    name = {"gptj": "transformer.h.0.mlp.fc_out.bias", "falcon": "transformer.h.0.mlp.dense_4h_to_h.bias"}[family]
    target = "transformer.layers.0.mlp.proj.bias"
    assert torch.equal(first[target], tensors[name])
    assert not second[target].any()
