"""Does the alignment of a half-precision port fail when a fault is planted in it? No cause is asked for here.

The rest of the benchmark names faults of float32 ports, where nothing hides in rounding. A fault that changes no token,
no step and no logit beyond noise on these prompts is without effect, not missed.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.result import AlignmentResult
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.fault import READING
from porting_kit.outcomes import Verdict
from tests.alignment.tiny_ports import TinyPort
from tests.diagnosis.planted_faults import make_healthy

DTYPE = "float16"
NEW_TOKENS = 24
FOUND, MISSED, WITHOUT_EFFECT = "found", "missed", "without effect"


def measure_missed(task: tuple[str, int, int, int]) -> list[dict[str, Any]]:
    """What the alignment says of every planted fault of one port.

    Args:
        task: family, seed, and which of the kinds: every `stride`-th from `start` on.
    """
    family, seed, stride, start = task
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        port = make_healthy(Path(folder), family, seed, dtype=DTYPE)
        healthy = align(port, port.state.build())
        kinds = [fault for fault in CATALOGUE if fault.phase != READING and fault.applies(port.state) is None]
        return [
            {
                "family": family,
                "seed": seed,
                "fault": fault.name,
                "outcome": judge_alignment(align(port, fault.apply(port.state).build()), healthy),
            }
            for fault in kinds[start::stride]
        ]


def align(port: TinyPort, model: Any) -> AlignmentResult:
    """One alignment of a port's model, one prompt a call."""
    options = AlignmentOptions(new_tokens=NEW_TOKENS, batch_sizes=(1,), differences=port.differences)
    return align_port_outputs(port.reference, model, port.prompts, port.state.tree, heads=port.heads, options=options)


def judge_alignment(faulty: AlignmentResult, healthy: AlignmentResult) -> str:
    """Whether a planted fault was found, was missed, or changed nothing that could be seen."""
    if faulty.verdict is Verdict.FAIL:
        return FOUND
    emitted = [[text.tokens for text in result.texts] for result in (faulty, healthy)]
    same = faulty.accepted_lengths == healthy.accepted_lengths and emitted[0] == emitted[1]
    return WITHOUT_EFFECT if same else MISSED


def count_missed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts, and each missed fault with its family."""
    counts = Counter(row["outcome"] for row in rows)
    missed = sorted(f"{row['family']}: {row['fault']}" for row in rows if row["outcome"] == MISSED)
    return {
        "dtype": DTYPE,
        **{outcome: counts[outcome] for outcome in (FOUND, MISSED, WITHOUT_EFFECT)},
        "names": missed,
    }
