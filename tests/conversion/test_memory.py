"""A conversion takes little more memory than the process itself, whatever the tensors, ranks and workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conversion.large_model import write_large_model

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
SCRIPT = """
import resource, sys
import torch
from porting_kit.conversion import convert_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.zeros(1).half().float()  # what torch loads when it first computes
convert_checkpoint(sys.argv[1], sys.argv[2], dtype="float16", tp_size=int(sys.argv[3]), workers=int(sys.argv[4]),
                   verify=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
ALLOWED_MIB = 110
"""Spans in work, torch's own buffers and code pages that are touched; the model has 223 MiB, its embedding 64."""


@pytest.mark.parametrize(("tp_size", "workers"), [(1, 1), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_memory_stays_far_below_the_model(tp_size: int, workers: int, tmp_path: Path) -> None:
    num_bytes = write_large_model(tmp_path / "base", **SIZES, num_hidden_layers=4)
    assert num_bytes > 2 * (ALLOWED_MIB << 20) - (8 << 20)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "base"), str(tmp_path / "out"), str(tp_size), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    grown_mib = int(done.stdout) / 1024
    assert grown_mib < ALLOWED_MIB
