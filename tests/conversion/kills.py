"""Kills conversions at random moments and goes on with them; for tests and for the benchmark, which has no pytest."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from porting_kit.conversion import ConversionOutcome, convert_checkpoint, spans
from tests.conversion.rule_models import LIKE_LLAMA

ROOT = Path(__file__).resolve().parents[2]
LARGER = {**LIKE_LLAMA, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("rank*"))}


def looks_complete(folder: Path) -> bool:
    """What any reader of checkpoints looks for: config.json and every rank's file under its name."""
    return (folder / "config.json").exists()


def start_conversion(base: Path, out: Path, delay: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.conversion.convert_worker", str(base), str(out), "2", str(delay), "20000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def kill_at(base: Path, out: Path, seconds: float) -> None:
    """Kill a conversion some time after its first span; it must not have finished."""
    process = start_conversion(base, out, 0.02)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("converting")
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def kill_and_resume(base: Path, out: Path, expected: dict[str, str], kills: int, seed: int) -> int:
    """Kill a conversion at random moments, each time going on; then let it end. Returns the spans it did not redo."""
    moments = random.Random(seed)
    for _ in range(kills):
        kill_at(base, out, moments.uniform(0, 0.25))
        assert not looks_complete(out)
        assert not list(out.glob("rank*.safetensors"))
    outcome = convert_with_small_spans(base, out)
    assert digest(out) == expected
    assert looks_complete(out)
    assert not list(out.glob(".*"))
    return outcome.resumed_spans


def convert_with_small_spans(base: Path, out: Path) -> ConversionOutcome:
    """A conversion of many spans, in this process."""
    before, spans.SPAN_BYTES = spans.SPAN_BYTES, 20000
    try:
        return convert_checkpoint(base, out, dtype="float16", tp_size=2, workers=2)
    finally:
        spans.SPAN_BYTES = before
