"""Measure the diagnosis: how often the cause is right, how often a clean port is blamed, how good near-ties are told.

Run `python -m tests.benchmarks.diagnosis [--quick] [--json]`. Every kind of the catalogue that a family can have is
planted in small random ports of four families and three seeds, and looked for once with tokens and logits, once with
tokens alone. Faults of the heads change no token and no logit: for them the accepted lengths are given as well. A case
that leaves nothing to explain (the fault changed nothing that was observed) is counted apart. Whether an alignment in
half precision fails on the faults at all is counted on one seed. `--write` keeps the result in
`notebooks/howto/diagnosis_rates.json`, of which `tests.benchmarks.diagnosis_page` makes the page. `--foreign` measures
engines that were made by hand, without the catalogue, in place of all this.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from porting_kit.diagnosis import Observation, name_cause
from porting_kit.diagnosis.search import Shelf
from tests.diagnosis.clean_ports import measure_clean, study_near_ties
from tests.diagnosis.foreign_cases import SETTINGS
from tests.diagnosis.foreign_rates import measure_foreign
from tests.diagnosis.missed_faults import count_missed, measure_missed
from tests.diagnosis.planted_faults import FAMILIES, Case, make_healthy, plant_all

RATES_FILE = Path(__file__).resolve().parents[2] / "notebooks" / "howto" / "diagnosis_rates.json"
SEEDS, OTHER_BASE = 3, 100
QUICK_FAMILIES = ("bloom", "llama")
QUICK_STRIDE, FULL_STRIDE = 5, 3
"""The quick run takes every fifth kind of each of two families; the full run shares a port's kinds among three parts,
so that more processes than ports are of use."""

LOGITS, TOKENS = "tokens and logits", "tokens alone"


def diagnose_case(case: Case, observation: Observation, shelf: Shelf) -> dict[str, Any]:
    """One diagnosis: what was named, and where in the ranking the planted fault stands."""
    started = time.perf_counter()
    found = name_cause(case.state, observation, shelf=shelf, pair_seconds=0)
    usable = [hypothesis.name for hypothesis in found.hypotheses if hypothesis.error is None and hypothesis.faults]
    named = " + ".join(fault.name for fault in found.causes) or None
    return {
        "fault": case.fault.name,
        "kind": case.fault.kind,
        "family": case.family,
        "seed": case.seed,
        "to_explain": found.to_explain,
        "named": named,
        "ties": [tie.name for tie in found.ties],
        "rank": usable.index(case.fault.name) + 1 if case.fault.name in usable else None,
        "decided_by": found.decided_by,
        "seconds": round(time.perf_counter() - started, 3),
    }


def measure_faults(task: tuple[str, int, int, int]) -> list[dict[str, Any]]:
    """Every planted fault of one port, both observations.

    Args:
        task: family, seed, and which of the kinds: every `stride`-th from `start` on.
    """
    family, seed, stride, start = task
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        port = make_healthy(Path(folder), family, seed)
        other = make_healthy(Path(folder), family, seed + OTHER_BASE)
        shelves: dict[str, Shelf] = {}
        for case in list(plant_all(port, other, family, seed))[start::stride]:
            shelf = shelves.setdefault(case.carrier, Shelf(case.state, keeps=True))
            rows.append({"from": LOGITS, **diagnose_case(case, case.with_logits(), shelf)})
            rows.append({"from": TOKENS, **diagnose_case(case, case.tokens_alone(), shelf)})
    return rows


def count_rates(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares over the cases that left something to explain; a tie is not a right first cause."""
    shown = [row for row in rows if row["to_explain"]]
    right = [row for row in shown if row["named"] == row["fault"]]
    first = [row for row in right if not row["ties"]]
    third = [row for row in shown if row["rank"] is not None and row["rank"] <= 3]
    tied = [row for row in shown if row["ties"] and row["fault"] in (row["named"], *row["ties"])]
    return {
        "cases": len(shown),
        "without_effect": len(rows) - len(shown),
        "top1": round(len(first) / len(shown), 4) if shown else None,
        "top3": round(len(third) / len(shown), 4) if shown else None,
        "tied": len(tied),
        "not_named": sum(row["named"] is None for row in shown),
        "kinds": len({row["fault"] for row in shown}),
        "seconds_per_case": round(sum(row["seconds"] for row in rows) / len(rows), 2) if rows else None,
    }


def build_confusion(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Planted fault -> what was named -> how often."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        named = "nothing to explain" if not row["to_explain"] else row["named"] or "none of these"
        named = f"{named} (tied)" if row["ties"] else named
        cells = table.setdefault(row["fault"], {})
        cells[named] = cells.get(named, 0) + 1
    return table


def measure(quick: bool, workers: int, keep: Path | None = None, seeds: int = SEEDS) -> dict[str, Any]:
    """Everything, in `workers` processes.

    Args:
        quick: two families, one seed, every fifth kind, two clean ports.
        workers: processes.
        keep: finished parts are kept here, and taken from here when the run is started again.
        seeds: random bases per family.
    """
    started = time.perf_counter()
    families = QUICK_FAMILIES if quick else FAMILIES
    seeds = 1 if quick else seeds
    tasks: list[tuple[Any, ...]] = []
    for seed in range(seeds):
        for place, family in enumerate(families):
            starts = [place % QUICK_STRIDE] if quick else range(FULL_STRIDE)
            tasks += [("faults", family, seed, QUICK_STRIDE if quick else FULL_STRIDE, start) for start in starts]
        tasks += [("clean", family, seed, quick) for family in families]
    tasks += [("missed", *task[1:]) for task in tasks if task[0] == "faults" and task[2] == 0]
    finished = read_finished(keep)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run_task, task): task for task in tasks if repr(task) not in finished}
        for done in as_completed(waiting):
            finished[repr(waiting[done])] = done.result()
            if keep is not None:
                with keep.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps([repr(waiting[done]), done.result()]) + "\n")
    fault_rows = [row for task in tasks if task[0] == "faults" for row in finished[repr(task)]]
    clean_rows = [row for task in tasks if task[0] == "clean" for row in finished[repr(task)]]
    missed_rows = [row for task in tasks if task[0] == "missed" for row in finished[repr(task)]]
    with_logits = [row for row in fault_rows if row["from"] == LOGITS]
    alone = [row for row in fault_rows if row["from"] == TOKENS]
    rates = count_rates(with_logits)
    return {
        "top1": rates["top1"],
        "top3": rates["top3"],
        "false_alarms": sum(row["is_blamed"] for row in clean_rows),
        "cases": rates["cases"],
        "clean_ports": len(clean_rows),
        "families": list(families),
        "seeds": seeds,
        LOGITS: rates,
        TOKENS: count_rates(alone),
        "near_ties": study_near_ties(clean_rows),
        "alignment": count_missed(missed_rows),
        "confusion": {LOGITS: build_confusion(with_logits), TOKENS: build_confusion(alone)},
        "failures": [row for row in fault_rows if row["to_explain"] and (row["named"] != row["fault"] or row["ties"])],
        "false_alarm_rows": [row for row in clean_rows if row["is_blamed"]],
        "seconds": round(time.perf_counter() - started, 1),
        "made": datetime.now(timezone.utc).date().isoformat(),
        "workers": workers,
    }


def run_task(task: tuple[Any, ...]) -> list[dict[str, Any]]:
    """One part: the faults of a port, what its alignment says of them, or the clean ports of a base."""
    return {"faults": measure_faults, "missed": measure_missed, "clean": measure_clean}[task[0]](task[1:])


def read_finished(keep: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The parts that an earlier run has finished."""
    if keep is None or not keep.is_file():
        return {}
    return dict(json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines())


def read_rates() -> dict[str, Any]:
    """The kept result, empty when there is none."""
    return json.loads(RATES_FILE.read_text(encoding="utf-8")) if RATES_FILE.is_file() else {}


def write_rates(document: dict[str, Any]) -> None:
    """Keep a result; parts that were not measured are left out."""
    kept = {name: value for name, value in document.items() if value is not None}
    RATES_FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def report_foreign(options: argparse.Namespace) -> int:
    """Print what was said of engines made by hand, or one JSON document."""
    bases = ("llama",) if options.quick else tuple(SETTINGS)
    document = measure_foreign(bases, workers=options.workers)
    if options.write:
        write_rates(read_rates() | {"foreign": document})
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for source, questions in document["outcomes"].items():
        for question, counts in questions.items():
            print(f"{source}, {question}: {counts}")
    for row in document["not_right"]:
        print(f"  {row['from']}: {row['base']} {row['engine']} -> {row['outcome']}: {row['said']}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Print the rates and every failure, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two families, one seed, every fifth kind")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RATES_FILE.name}")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="random bases per family")
    parser.add_argument("--keep", type=Path, help="keep finished parts in this file, and go on from it")
    parser.add_argument("--foreign", action="store_true", help="engines made by hand, without the catalogue")
    options = parser.parse_args(arguments)
    if options.foreign:
        return report_foreign(options)
    document = measure(options.quick, options.workers, options.keep, options.seeds)
    if options.write:
        write_rates(document | {"foreign": read_rates().get("foreign")})
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for source in (LOGITS, TOKENS):
        print(f"{source}: {document[source]}")
    print(f"false alarms: {document['false_alarms']} of {document['clean_ports']} clean ports")
    print(f"faults that an alignment fails on: {document['alignment']}")
    for dtype, figures in document["near_ties"].items():
        print(f"near-ties in {dtype}: {figures}")
    for row in document["failures"]:
        ties = f", tied with {', '.join(row['ties'])}" if row["ties"] else ""
        print(f"  {row['from']}: {row['family']} {row['seed']} {row['fault']} -> {row['named']}{ties}")
    for row in document["false_alarm_rows"]:
        print(f"  blamed: {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
