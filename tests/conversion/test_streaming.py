"""Spans give the bytes that whole tensors give, for every family, any number of workers and any size of span."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from porting_kit.architectures import read_base_config
from porting_kit.architectures.operations import Concatenate, PadRows, ReorderBlocks, Stack, Take
from porting_kit.conversion import convert_checkpoint, open_tensor_source, plan_conversion, read_head_set, spans
from porting_kit.conversion.apply import cut_piece
from porting_kit.conversion.convert import iterate_targets
from porting_kit.conversion.row_map import ELEMENTWISE, ROW_MOVES, map_rows
from porting_kit.conversion.stream import MemoryGate, Progress
from porting_kit.errors import ConversionError
from tests.conversion.kills import digest
from tests.conversion.rule_models import RAW, head_tensors, random_tensors, raw_config, write_model


@pytest.mark.parametrize("family", sorted(RAW))
def test_spans_give_what_whole_tensors_give(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family, two ranks, spans of a few rows, from bfloat16 to float16."""
    monkeypatch.setattr(spans, "SPAN_BYTES", 200)
    raw = raw_config(family)
    write_model(tmp_path / "base", raw, dtype=torch.bfloat16)
    source = open_tensor_source(tmp_path / "base")
    plan = plan_conversion(read_base_config(raw), source, dtype="float16", tp_size=2)
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float16", tp_size=2, verify=False, workers=2)
    stored = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(2)]
    for planned, _, whole in iterate_targets(plan, source, None):
        for piece in planned.pieces:
            assert torch.equal(stored[piece.rank].pop(piece.name), cut_piece(whole, planned, piece)), planned.target
    assert stored == [{}, {}]
    whole = [
        planned.target
        for planned in plan.tensors
        if planned.sources and map_rows(planned, [source.shape(name) for name in planned.sources], plan.dims) is None
    ]
    moving = (*ROW_MOVES, *ELEMENTWISE, Concatenate, ReorderBlocks, Take, Stack, PadRows)
    mixes = [p.target for p in plan.tensors if not all(isinstance(step, moving) for step in p.operations)]
    assert whole == mixes  # all others move rows, block by block


@pytest.mark.parametrize("ranks", [{}, {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}])
def test_bytes_do_not_depend_on_workers_or_spans(
    ranks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks hold two key/value heads twice; heads and base are padded alike."""
    write_model(tmp_path / "base", raw_config("llama"), dtype=torch.bfloat16)
    save_file(head_tensors(2), tmp_path / "medusa_lm_head.safetensors")
    found = []
    for span_bytes, workers in ((100, 1), (100, 2), (100, 4), (4 << 20, 1), (4 << 20, 4)):
        monkeypatch.setattr(spans, "SPAN_BYTES", span_bytes)
        out = tmp_path / f"{span_bytes}-{workers}"
        convert_checkpoint(tmp_path / "base", out, heads=tmp_path, dtype="float16", workers=workers, **ranks)
        found.append(digest(out))
    assert len(found[0]) == ranks.get("tp_size", 1) * ranks.get("pp_size", 1)
    assert all(one == found[0] for one in found)


def test_no_tensor_is_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is larger than a span; every source byte is read once, whatever the ranks."""
    monkeypatch.setattr(spans, "SPAN_BYTES", 256)
    write_model(tmp_path / "base", raw_config("llama", vocab_size=40))  # no padding, which reads the last row again
    source_type = type(open_tensor_source(tmp_path / "base"))
    read: list[tuple[str, int, int]] = []
    read_rows = source_type.read_rows

    def watch(self, name: str, start: int, stop: int, width: int, **options) -> torch.Tensor:
        read.append((name, start, stop))
        return read_rows(self, name, start, stop, width, **options)

    monkeypatch.setattr(source_type, "read_rows", watch)
    monkeypatch.setattr(source_type, "read", lambda *_: pytest.fail("a whole tensor was read"))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float16", tp_size=4, verify=False)
    source = open_tensor_source(tmp_path / "base")
    for name in source.names():
        rows = sorted((start, stop) for other, start, stop in read if other == name)
        assert rows[0][0] == 0
        assert all(one[1] == two[0] for one, two in itertools.pairwise(rows)), name
        assert rows[-1][1] == source.shape(name)[0]


@pytest.mark.parametrize(("value", "message"), [(1e5, "does not fit float16"), (float("nan"), "holds inf or nan")])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_value_that_would_overflow_stops_everything(
    value: float, message: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "SPAN_BYTES", 256)
    raw = raw_config("llama")
    tensors = random_tensors(read_base_config(raw), torch.bfloat16)
    tensors["model.layers.1.mlp.down_proj.weight"][7, 3] = value
    write_model(tmp_path / "base", raw, tensors)
    with pytest.raises(ConversionError, match=message) as caught:
        convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float16", workers=workers)
    assert "layers.1.mlp" in caught.value.subject
    assert caught.value.where == f"{tmp_path / 'base' / 'model.safetensors'}: model.layers.1.mlp.down_proj.weight"
    assert caught.value.next_step
    if math.isnan(value):
        assert (caught.value.expected, caught.value.found) == ("finite values", "1 values that are not finite")
    assert not (tmp_path / "out").exists()


def test_the_memory_gate_holds_its_bound_and_lets_the_large_in_alone() -> None:
    gate = MemoryGate(10)
    gate.enter(25)  # more than the bound, but nobody else is in
    gate.leave(25)
    gate.enter(6)
    gate.enter(4)
    assert gate._held == 10
    gate.leave(6)
    gate.enter(5)
    assert gate._held == 9


def test_progress_says_rate_and_time_left(tmp_path: Path) -> None:
    seen: list[Progress] = []
    write_model(tmp_path / "base", raw_config("llama"))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float16", progress=seen.append)
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "rank0.safetensors").values())
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (total, total)
    assert seen[-1].seconds_left == 0
    half = Progress(done_bytes=60, total_bytes=100, seconds=2.0, resumed_bytes=20)
    assert (half.bytes_per_second, half.seconds_left) == (20.0, 2.0)
    assert Progress(0, 100, 0.0).seconds_left is None


@pytest.mark.parametrize("has_biases", [True, False])
def test_heads_are_streamed_too(has_biases: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("llama"))
    tensors = {name: tensor for name, tensor in head_tensors(2).items() if has_biases or not name.endswith("bias")}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    heads = read_head_set(tmp_path)
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=heads, dtype="float32")
    stored = load_file(tmp_path / "out" / "rank0.safetensors")
    assert torch.equal(stored["medusa_heads.1.lm_head.weight"], tensors["1.1.weight"])
    bias = tensors.get("1.0.linear.bias", torch.zeros(32))
    assert torch.equal(stored["medusa_heads.1.medusa_layers.0.linear.bias"], bias)
    assert outcome.verified == len(outcome.targets)


def test_a_pickle_gives_the_same_bytes_and_a_warning(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "base", raw_config("llama"))
    convert_checkpoint(tmp_path / "base", tmp_path / "out", dtype="float16")
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "base" / "pytorch_model.bin")
    outcome = convert_checkpoint(tmp_path / "base", tmp_path / "pickled", dtype="float16")
    assert digest(tmp_path / "pickled") == digest(tmp_path / "out")
    assert any("a pickle" in warning for warning in outcome.warnings)


def test_the_receipt_names_files_rules_and_versions(tmp_path: Path) -> None:
    write_model(tmp_path / "base", raw_config("llama"))
    save_file(head_tensors(1), tmp_path / "medusa_lm_head.safetensors")
    receipt = convert_checkpoint(tmp_path / "base", tmp_path / "out", heads=tmp_path, dtype="float16").receipt()
    stated = {Path(file["path"]).name: file["sha256"] for file in receipt["files"]}
    files = (tmp_path / "base" / "model.safetensors", tmp_path / "medusa_lm_head.safetensors")
    assert stated == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(receipt["rules"]) == 64
    assert receipt["versions"]["torch"] == torch.__version__
    again = convert_checkpoint(tmp_path / "base", tmp_path / "two", heads=tmp_path, dtype="float16", tp_size=2)
    assert again.receipt()["rules"] != receipt["rules"]
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["files"] == receipt["files"]
