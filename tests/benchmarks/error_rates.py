"""Measure how often the alignment is wrong: false alarms, missed faults, and wrongly named causes.

Run `python -m tests.benchmarks.error_rates [--quick] [--json]`. Healthy half-precision ports of small random bases must
pass; every fault of the catalogue that a port can have is planted, must make the alignment fail, and must be named. A
fault that changes no token, no logit beyond noise and no step on these prompts is counted as without effect, not as
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from porting_kit.alignment.result import AlignmentResult
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.diagnosis import name_cause
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.outcomes import Verdict
from tests.alignment.tiny_ports import TinyPort, make_port

FAMILIES = ("llama", "bloom", "gptneox", "qwen2")


def align(port: TinyPort, model: Any, new_tokens: int) -> AlignmentResult:
    """One alignment of a port's model, one prompt a call."""
    options = AlignmentOptions(new_tokens=new_tokens, batch_sizes=(1,), differences=port.differences)
    return align_port_outputs(port.reference, model, port.prompts, port.state.tree, heads=port.heads, options=options)


def measure_port(port: TinyPort, new_tokens: int) -> dict[str, Any]:
    """Healthy once, then every fault the port can have."""
    healthy = align(port, port.state.build(), new_tokens)
    verdicts: Counter[str] = Counter()
    named: Counter[str] = Counter()
    details = []
    for fault in CATALOGUE:
        if fault.applies(port.state) is not None:
            continue
        result = align(port, fault.apply(port.state).build(), new_tokens)
        if result.verdict is Verdict.PASS:
            same = result.accepted_lengths == healthy.accepted_lengths and result.tokens_equal == healthy.tokens_equal
            verdicts["without effect" if same else "missed"] += 1
            continue
        verdicts["found"] += 1
        diagnosis = name_cause(port.state, result)
        if diagnosis.cause is fault:
            outcome = "tied" if diagnosis.ties else "named"
        else:
            tied = fault in [tie.fault for tie in diagnosis.ties]
            outcome = "tied" if tied else "not named" if diagnosis.cause is None else "misnamed"
        named[outcome] += 1
        if outcome != "named":
            details.append({"fault": fault.name, "outcome": outcome, "verdict": diagnosis.verdict})
    return {
        "tokens": healthy.num_tokens,
        "wrong_tokens": healthy.wrong_tokens,
        "near_ties": healthy.near_ties,
        "healthy_verdict": healthy.verdict.value,
        "tolerance": healthy.noise.near_tie_tolerance,
        "resolved": healthy.noise.resolved,
        "faults": dict(verdicts),
        "causes": dict(named),
        "details": details,
    }


def add_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals over all ports."""
    faults, causes = Counter(), Counter()
    for row in rows:
        faults.update(row["faults"])
        causes.update(row["causes"])
    return {
        "ports": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "false_alarm_tokens": sum(row["wrong_tokens"] for row in rows),
        "false_alarm_ports": sum(row["healthy_verdict"] != "pass" for row in rows),
        "near_ties": sum(row["near_ties"] for row in rows),
        "faults": dict(faults),
        "causes": dict(causes),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the totals, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one family, one seed")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--seeds", type=int, default=2, help="random bases per family and dtype")
    options = parser.parse_args(arguments)
    families, seeds = (FAMILIES[:1], 1) if options.quick else (FAMILIES, options.seeds)
    dtypes = ("float16",) if options.quick else ("float16", "bfloat16")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            for dtype in dtypes:
                for seed in range(seeds):
                    port = make_port(Path(folder) / f"{family}-{dtype}-{seed}", family, dtype=dtype, seed=seed)
                    rows.append({"family": family, "dtype": dtype, "seed": seed, **measure_port(port, 24)})
    document = {"total": add_up(rows), "rows": rows}
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    total = document["total"]
    print(f"{total['ports']} healthy ports: {total['false_alarm_ports']} called faulty; {total['tokens']} tokens: ")
    print(f"  {total['false_alarm_tokens']} called wrong, {total['near_ties']} near-ties")
    print(f"faults planted: {total['faults']}; causes: {total['causes']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
