"""A sharded checkpoint is aligned by as many processes as it has ranks; faults of cutting fail it and are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from porting_kit.errors import CheckpointError, KernelRefusal, PortFileError, PortingKitError
from porting_kit.outcomes import Verdict
from porting_kit.steps.align import align_port
from porting_kit.steps.convert import convert_port
from porting_kit.steps.proof import prove_port
from porting_kit.steps.ranks import describe_error, join_ranks, needs_ranks, rebuild_error
from tests.conversion.shard_changes import cut_bias_equally, deal_kv_heads, exchange_parts
from tests.steps.sharded_port import change_ranks, open_run, write_port

QKV = "transformer.layers.0.attention.qkv"
UP = "transformer.layers.1.mlp.fc.weight"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_port(tmp_path_factory.mktemp("sharded"))


def test_a_bias_cut_wrongly_fails_and_is_named(port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run", tp_size=2)
    convert_port(run)
    change_ranks(run.folder.checkpoint, lambda ranks: cut_bias_equally(ranks, f"{QKV}.bias", 2, 1, 8))
    result = align_port(run, edited=True)
    assert result.outcome.verdict is Verdict.FAIL
    assert result.cause is not None
    assert result.cause["fault"] == "fused tensor cut into equal parts"
    assert "query, key and value" in result.cause["fix"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_sharded_port_passes(tp_size: int, pp_size: int, port: Path, tmp_path: Path) -> None:
    """Four ranks share two key/value heads."""
    run = open_run(port, tmp_path / "run", tp_size=tp_size, pp_size=pp_size)
    result = align_port(run)
    assert result.outcome.verdict is Verdict.PASS, result.outcome.summary
    assert result.document()["tokens_equal"]
    assert len(list(run.folder.checkpoint.glob("rank*"))) == tp_size * pp_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp_size", "change", "fault"),
    [
        (2, lambda ranks: exchange_parts(ranks, UP), "shards in another order"),
        (4, lambda ranks: deal_kv_heads(ranks, f"{QKV}.weight", 1, 8), "kv heads dealt round"),
        (4, lambda ranks: exchange_parts(ranks, UP), "shards in another order"),
    ],
)
def test_a_wrong_cut_fails_and_is_named(tp_size: int, change, fault: str, port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run", tp_size=tp_size)
    convert_port(run)
    change_ranks(run.folder.checkpoint, change)
    result = align_port(run, edited=True)
    assert result.outcome.verdict is Verdict.FAIL
    assert result.cause is not None
    assert result.cause["fault"] == fault


@pytest.mark.slow
def test_a_fault_that_is_none_of_cutting_is_named_too(port: Path, tmp_path: Path) -> None:
    """All ranks' files are right; the base's epsilon is not what the config says."""
    run = open_run(port, tmp_path / "run", tp_size=2)
    convert_port(run)
    file = run.folder.checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rotary_base": 10.0}))
    result = align_port(run, edited=True)
    assert result.outcome.verdict is Verdict.FAIL
    assert result.cause is not None
    assert result.cause.get("kind") != "sharding"


@pytest.mark.slow
def test_torchrun_starts_the_ranks(port: Path, tmp_path: Path) -> None:
    """One document, from the first rank; another number of processes is refused by name."""
    for processes, code in ((2, 0), (3, 1)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "porting_kit", "align", str(port), "--out", str(tmp_path / f"run{processes}")]
        command += ["-p", "target.tp_size=2", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr[-2000:]
        document = json.loads(done.stdout)
        if processes == 2:
            assert document["verdict"] == "pass"
        else:
            assert "another number of processes" in document["error"]["subject"]


def test_a_bit_flip_is_found_and_named_by_the_proof(port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run", tp_size=2)
    convert_port(run, verify=False)
    assert prove_port(run).outcome.verdict is Verdict.PASS

    def flip(ranks: list[dict[str, torch.Tensor]]) -> None:
        ranks[1][UP].view(torch.int32).reshape(-1)[5] ^= 1

    change_ranks(run.folder.checkpoint, flip)
    result = prove_port(run)
    assert result.outcome.verdict is Verdict.FAIL
    assert [failure.target for failure in result.proof.failures] == [UP]
    assert run.folder.outcome("convert").verdict is Verdict.FAIL  # so that no later step uses it
    assert UP in result.document()["unproved_by"][0]["targets"]


def test_a_changed_source_is_said_by_the_proof(port: Path, tmp_path: Path) -> None:
    run = open_run(port, tmp_path / "run")
    convert_port(run, verify=False)
    receipt = run.folder.checkpoint / "receipt.json"
    document = json.loads(receipt.read_text())
    document["files"][0]["sha256"] = "0" * 64
    receipt.write_text(json.dumps(document))
    result = prove_port(run)
    assert result.outcome.verdict is Verdict.PASS
    assert result.changed_files == (document["files"][0]["path"],)
    assert "changed since" in result.outcome.summary


def test_processes_are_needed_for_ranks_only(port: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not needs_ranks(open_run(port, tmp_path / "one"))
    run = open_run(port, tmp_path / "two", tp_size=2)
    assert needs_ranks(run)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not needs_ranks(run)
    with pytest.raises(PortFileError, match="another number of processes"):
        join_ranks(run)


@pytest.mark.parametrize("kind", [PortFileError, KernelRefusal])
def test_an_error_crosses_processes_as_it_is(kind: type[PortingKitError]) -> None:
    error = kind("subject", expected=1, found=2, where="here", items=["x"], next_step="do")
    again = rebuild_error(*describe_error(error))
    assert (type(again), again.message, again.exit_code) == (kind, error.message, error.exit_code)


@pytest.mark.slow
def test_an_error_of_any_rank_is_raised_again(port: Path, tmp_path: Path) -> None:
    """The second rank's file is gone: its own error comes back, not that the first one waited for it in vain."""
    run = open_run(port, tmp_path / "run", tp_size=2)
    convert_port(run)
    (run.folder.checkpoint / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="a checkpoint file is missing"):
        align_port(run, edited=True)


def test_other_ranks_wait_for_the_first_to_make_the_run_folder(port: Path, tmp_path: Path, monkeypatch) -> None:
    """Without waiting they would meet a folder that is there and has no marker yet."""
    root = tmp_path / "run"
    root.mkdir()
    (root / ".run.json.half").write_text("{")
    monkeypatch.setenv("RANK", "1")
    timer = threading.Timer(0.3, lambda: (root / "run.json").write_text('{"port": "sharded"}'))
    timer.start()
    assert open_run(port, root, tp_size=2).folder.root == root
