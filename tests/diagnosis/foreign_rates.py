"""How often the diagnosis is right about engines that were made without its catalogue."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from porting_kit.diagnosis import Observation, name_cause
from porting_kit.diagnosis.search import Shelf
from tests.alignment.tiny_ports import TinyPort, make_port
from tests.diagnosis.foreign_cases import ENGINES, SETTINGS
from tests.diagnosis.foreign_engines import (
    NEW_TOKENS,
    Engine,
    describe,
    diagnose_files,
    judge_diagnosis,
    run_engine,
    write_files,
)
from tests.diagnosis.foreign_medusa import LOOPS, run_loop

LOGITS, TOKENS, STEPS = "tokens and logits", "tokens alone", "tokens, logits and steps"
SEED = 11
PAIR_SECONDS = 20.0
"""Processor time for two faults at once; they are looked for only where there are two, for time's sake."""

TOLERANCE = 1e-4
"""Near-tie tolerance in logits and relative logit noise of the float32 loop."""

KNOWN, TWO, UNKNOWN, CLEAN = "in the catalogue", "two at once", "not in the catalogue", "clean"


def make_foreign_port(folder: Path, base: str, dtype: str = "float32", seed: int = SEED) -> TinyPort:
    """The healthy port of a base, on weights that no other benchmark uses."""
    return make_port(folder / f"{base}-{dtype}-{seed}", base, seed=seed, dtype=dtype, **SETTINGS[base])


def classify(engine: Engine) -> str:
    """Which question an engine asks."""
    if not engine.accepts:
        return CLEAN
    if None in engine.accepts:
        return UNKNOWN
    return TWO if any(" + " in name for name in engine.accepts) else KNOWN


def measure_base(task: tuple[str, int]) -> list[dict[str, Any]]:
    """Every engine of one base, from logits and from tokens alone; on LLaMA the draft tree's loops as well."""
    base, seed = task
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ports: dict[str, tuple[TinyPort, Shelf]] = {}
        for engine in ENGINES:
            if base not in engine.bases:
                continue
            if engine.dtype not in ports:
                port = make_foreign_port(folder, base, engine.dtype, seed)
                ports[engine.dtype] = port, Shelf(port.state, keeps=True)
            rows += measure_engine(engine, base, *ports[engine.dtype], folder)
        if base == "llama":
            rows += [row for loop in LOOPS for row in measure_loop(loop, base, *ports["float32"])]
    return [{"seed": seed, **row} for row in rows]


def measure_engine(engine: Engine, base: str, port: TinyPort, shelf: Shelf, folder: Path) -> list[dict[str, Any]]:
    """One engine's files, diagnosed with and without logits."""
    tokens, logits = write_files(port, run_engine(port, engine), folder)
    rows = []
    seconds = PAIR_SECONDS if classify(engine) == TWO else 0.0
    for source, file in ((LOGITS, logits), (TOKENS, None)):
        found = diagnose_files(port, tokens, file, dtype=engine.dtype, shelf=shelf, pair_seconds=seconds)
        rows.append(_row(engine, base, source, found))
    return rows


def measure_loop(loop: Any, base: str, port: TinyPort, shelf: Shelf) -> list[dict[str, Any]]:
    """One way of decoding with the tree; heads show in the steps alone."""
    steps = run_loop(port, loop, NEW_TOKENS)
    observed = Observation(
        port.prompts,
        steps.tokens,
        TOLERANCE,
        accepted_lengths=steps.accepted_lengths,
        logits=steps.logits,
        logits_noise=TOLERANCE,
    )
    found = name_cause(port.state, observed, shelf=shelf, pair_seconds=0)
    return [_row(Engine(loop.name, (base,), loop.accepts), base, STEPS, found)]


def _row(engine: Engine, base: str, source: str, found: Any) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "dtype": engine.dtype,
        "base": base,
        "from": source,
        "question": classify(engine),
        "outcome": judge_diagnosis(engine, found),
        "said": describe(found),
        "to_explain": found.to_explain,
        "observed": found.observed,
    }


def count_outcomes(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Source -> question -> outcome -> how often."""
    table: dict[str, dict[str, Counter[str]]] = {}
    for row in rows:
        table.setdefault(row["from"], {}).setdefault(row["question"], Counter())[row["outcome"]] += 1
    return {source: {name: dict(counts) for name, counts in kinds.items()} for source, kinds in table.items()}


def measure_foreign(bases: Sequence[str] = tuple(SETTINGS), seeds: int = 1, workers: int = 2) -> dict[str, Any]:
    """All of it.

    Returns:
        `cases`; `wrong`, a wrong name given with confidence; `blamed`, clean engines; `outcomes`; and every row whose
        outcome is not right.
    """
    tasks = [(base, SEED + seed) for seed in range(seeds) for base in bases]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = [row for found in pool.map(measure_base, tasks) for row in found]
    counts = Counter(row["outcome"] for row in rows)
    return {
        "cases": len(rows),
        "wrong": counts["wrong"],
        "blamed": counts["blamed"],
        "bases": list(bases),
        "seeds": seeds,
        "outcomes": count_outcomes(rows),
        "not_right": [row for row in rows if row["outcome"] not in ("right", "no effect")],
    }
