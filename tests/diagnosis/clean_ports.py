"""Clean ports: is any of them blamed? And near-ties: how often the rule blames noise, how often it excuses a fault.

A port counts as blamed when its alignment fails, or when the diagnosis of what it emitted finds something to explain.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.inherent import choose_differences, matched_to_library
from porting_kit.alignment.oracle import Status, judge_texts
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.diagnosis import name_cause
from porting_kit.diagnosis.catalogue import find_fault
from porting_kit.diagnosis.observation import observe
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.medusa.tree import read_tree
from porting_kit.outcomes import Verdict
from tests.alignment.tiny_ports import TinyPort
from tests.diagnosis.planted_faults import make_healthy

DTYPES = ("float32", "float16", "bfloat16")
TREES = ("small_3", "small_2", [[0], [0, 0], [0, 0, 0]])
NEW_TOKENS = 20
STUDIED_FAULTS = ("qkv_bias_dropped", "rope_base_lost", "q_scale_twice", "norms_swapped", "activation_variant")
"""Faults of different strength, planted to see how many of their wrong tokens pass as near-ties."""


def measure_clean(task: tuple[str, int, bool]) -> list[dict[str, Any]]:
    """Every dtype and tree of one base.

    Args:
        task: family, seed, and whether one dtype and one tree are enough.
    """
    family, seed, quick = task
    torch.set_num_threads(1)
    rows = []
    for dtype in DTYPES[1:2] if quick else DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            port = make_healthy(Path(folder), family, seed, dtype=dtype)
            for place, tree in enumerate(TREES[:1] if quick else TREES):
                row = measure_port(port, tree)
                if place == 0:
                    row |= count_excused(port, row["tolerance"])
                rows.append({"family": family, "seed": seed, "dtype": dtype, "tree": str(tree), **row})
    return rows


def measure_port(port: TinyPort, tree: Any) -> dict[str, Any]:
    """Align and diagnose one healthy port with this tree."""
    state = replace(port.state, tree=read_tree(tree))
    options = AlignmentOptions(new_tokens=NEW_TOKENS, batch_sizes=(1,), differences=port.differences)
    result = align_port_outputs(
        port.reference, state.build(), port.prompts, state.tree, heads=port.heads, options=options
    )
    diagnosis = name_cause(state, observe(result), pair_seconds=0)
    margins = torch.cat([text.margins for text in result.texts])
    return {
        "is_blamed": result.verdict is not Verdict.PASS or diagnosis.to_explain > 0 or diagnosis.own_model is not None,
        "verdict": result.summary,
        "tokens": result.num_tokens,
        "near_ties": result.near_ties,
        "wrong_tokens": result.wrong_tokens,
        "tolerance": result.noise.near_tie_tolerance,
        "gap_error": result.noise.gap_error,
        "typical_gap_error": result.noise.typical_gap_error,
        "largest_shortfall": max(-float(margins.min()), 0.0),
        "resolved": result.noise.resolved,
    }


def count_excused(port: TinyPort, tolerance: float) -> dict[str, int]:
    """Wrong tokens of faulty ports, and how many of them the tolerance calls near-ties."""
    counts = {"faulty_tokens": 0, "excused_tokens": 0, "faulty_texts": 0, "excused_texts": 0}
    end_ids = port.reference.settings.end_ids
    texts = [
        [*prompt, *row] for prompt, row in zip(port.prompts, port.reference.generate(port.prompts, 8), strict=True)
    ]
    shown = choose_differences(port.reference, port.differences, texts, ContextOracle(port.state.build()).logits(texts))
    for name in STUDIED_FAULTS:
        fault = find_fault(name)
        if fault.applies(port.state) is not None:
            continue
        tokens = generate_greedy(fault.apply(port.state).build(), port.prompts, NEW_TOKENS, end_ids).tokens
        with matched_to_library(port.reference, shown):
            judged = judge_texts(port.reference, port.prompts, tokens, tolerance, end_ids=end_ids)
        for text in judged:
            ties, wrong = len(text.positions(Status.NEAR_TIE)), len(text.positions(Status.WRONG))
            counts["faulty_tokens"] += ties + wrong
            counts["excused_tokens"] += ties
            counts["faulty_texts"] += ties + wrong > 0
            counts["excused_texts"] += ties > 0 and wrong == 0
    return counts


def study_near_ties(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per dtype: the noise, the tolerance, and both error rates of the rule."""
    found = {}
    for dtype in DTYPES:
        mine = [row for row in rows if row["dtype"] == dtype]
        if not mine:
            continue
        tokens = sum(row["tokens"] for row in mine)
        faulty = sum(row.get("faulty_tokens", 0) for row in mine)
        texts = sum(row.get("faulty_texts", 0) for row in mine)
        found[dtype] = {
            "ports": len(mine),
            "tokens": tokens,
            "near_ties": sum(row["near_ties"] for row in mine),
            "blamed_tokens": sum(row["wrong_tokens"] for row in mine),
            "blamed_rate": sum(row["wrong_tokens"] for row in mine) / tokens,
            "tolerance_mean": sum(row["tolerance"] for row in mine) / len(mine),
            "gap_error_largest": max(row["gap_error"] for row in mine),
            "typical_gap_error_mean": sum(row["typical_gap_error"] for row in mine) / len(mine),
            "largest_shortfall": max(row["largest_shortfall"] for row in mine),
            "resolved_mean": sum(row["resolved"] for row in mine) / len(mine),
            "faulty_tokens": faulty,
            "excused_tokens": sum(row.get("excused_tokens", 0) for row in mine),
            "excused_rate": sum(row.get("excused_tokens", 0) for row in mine) / faulty if faulty else None,
            "faulty_texts": texts,
            "excused_texts": sum(row.get("excused_texts", 0) for row in mine),
        }
    return found
