"""Engines made by hand, without the catalogue: the right cause, "none of these", or nothing at all is said of each."""

from dataclasses import replace

import pytest

from porting_kit.diagnosis import Observation, name_cause
from porting_kit.diagnosis.search import Shelf
from tests.diagnosis.foreign_cases import ENGINES, SETTINGS
from tests.diagnosis.foreign_engines import (
    NEW_TOKENS,
    describe,
    diagnose_files,
    judge_diagnosis,
    run_engine,
    write_files,
)
from tests.diagnosis.foreign_medusa import LOOPS, run_loop
from tests.diagnosis.foreign_rates import TOLERANCE, make_foreign_port, measure_loop

FAST = (
    "q, k, v biases lost",
    "neighbours rotated",
    "another fine-tune, 5 % away",
    "start token lost",
    "float32 as TF32 rounds",
)
CASES = [
    pytest.param(base, engine, id=f"{base}: {engine.name}", marks=() if is_fast else pytest.mark.slow)
    for base in SETTINGS
    for engine in ENGINES
    if base in engine.bases
    for is_fast in [base == "qwen2" and engine.name in FAST]
]
EQUAL = {"rotary scaling lost": "dynamic scaling is none at all below the original length"}
"""Engines of which two names are equally true on short texts."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A port and its models by base and dtype."""
    known = {}

    def get(base, dtype="float32"):
        if (base, dtype) not in known:
            port = make_foreign_port(tmp_path_factory.mktemp(base), base, dtype)
            known[base, dtype] = port, Shelf(port.state, keeps=True)
        return known[base, dtype]

    return get


@pytest.mark.parametrize(("base", "engine"), CASES)
def test_what_is_said_of_a_foreign_engine_is_true(base, engine, opened, tmp_path):
    port, shelf = opened(base, engine.dtype)
    tokens, logits = write_files(port, run_engine(port, engine), tmp_path)
    seconds = 20.0 if any(name and " + " in name for name in engine.accepts) else 0.0
    found = diagnose_files(port, tokens, logits, dtype=engine.dtype, shelf=shelf, pair_seconds=seconds)
    allowed = {"right", "tied"} if engine.name in EQUAL else {"right"}
    assert judge_diagnosis(engine, found) in allowed, describe(found)
    alone = diagnose_files(port, tokens, dtype=engine.dtype, shelf=shelf)
    assert judge_diagnosis(engine, alone) not in ("wrong", "blamed"), describe(alone)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_what_is_said_of_a_foreign_draft_tree_is_true(loop, opened):
    (row,) = measure_loop(loop, "llama", *opened("llama"))
    assert row["outcome"] == "right", row["said"]


@pytest.mark.parametrize("parts", ["tokens", "tokens and logits", "tokens and steps", "half of the steps"])
def test_a_bonus_token_read_at_the_root_is_named(parts, opened):
    """It repeats the first accepted draft, which a draft behind the accepted ones may equal by chance."""
    port, shelf = opened("llama")
    steps = run_loop(port, next(loop for loop in LOOPS if loop.bonus_from_root), NEW_TOKENS)
    observed = Observation(port.prompts, steps.tokens, TOLERANCE)
    if parts == "tokens and logits":
        observed = replace(observed, logits=steps.logits, logits_noise=TOLERANCE)
    if "steps" in parts:
        share = 2 if parts.startswith("half") else 1
        lengths = [row[: len(row) // share] for row in steps.accepted_lengths]
        observed = replace(observed, accepted_lengths=lengths)
    found = name_cause(port.state, observed, shelf=shelf, pair_seconds=0)
    assert describe(found) == "bonus_token_from_wrong_node"
    assert found.hypotheses[0].unexplained == 0


def test_a_wrong_name_would_be_seen(opened, tmp_path):
    """The judge of these tests is itself put to the test."""
    port, shelf = opened("qwen2")
    engine = next(engine for engine in ENGINES if engine.name == "q, k, v biases lost")
    found = diagnose_files(port, *write_files(port, run_engine(port, engine), tmp_path), shelf=shelf)
    assert judge_diagnosis(replace(engine, accepts=("rope_base_lost",)), found) == "wrong"
    assert judge_diagnosis(replace(engine, accepts=(None,)), found) == "wrong"
    assert judge_diagnosis(replace(engine, accepts=()), found) == "blamed"
