"""Sharded checkpoints: two tensor-parallel and two pipeline ranks give what one rank gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from porting_kit.conversion.convert import convert_checkpoint
from porting_kit.emulator import Emulator
from porting_kit.errors import EmulatorError
from tests.emulator.differential import relative
from tests.emulator.rank_worker import run_phases
from tests.emulator.toy_models import make_reference, save_reference

SHARDINGS = {"one": {}, "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as one rank, as two tensor-parallel ranks and as two pipeline ranks."""
    root = tmp_path_factory.mktemp("ranks")
    base = save_reference(make_reference("llama"), root / "base")
    for name, sharding in SHARDINGS.items():
        convert_checkpoint(base, root / name, dtype="float32", **sharding)
    return {name: root / name for name in SHARDINGS}


def test_two_ranks_give_what_one_rank_gives(checkpoints: dict[str, Path], emulator: Emulator, tmp_path: Path) -> None:
    expected = run_phases(emulator.load_checkpoint(checkpoints["one"]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "tests.emulator.rank_worker", "bundled", str(tmp_path)]
    folders = [str(checkpoints["tp2"]), str(checkpoints["pp2"])]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(
        [*launcher, *worker, *folders], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("tp2", "pp2"):
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            for phase, logits in expected.items():
                assert relative(found[phase], logits) < 5e-6, (name, rank, phase)


def test_a_sharded_checkpoint_needs_its_processes(checkpoints: dict[str, Path], emulator: Emulator) -> None:
    with pytest.raises(EmulatorError, match="one process for each of its ranks"):
        emulator.load_checkpoint(checkpoints["tp2"])
