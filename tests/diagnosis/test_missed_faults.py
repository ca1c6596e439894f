"""The benchmark tells a fault that the alignment missed from one that changed nothing."""

from types import SimpleNamespace

import pytest

from porting_kit.outcomes import Verdict
from tests.diagnosis.missed_faults import FOUND, MISSED, WITHOUT_EFFECT, count_missed, judge_alignment, measure_missed


def result(verdict, tokens=(1, 2), lengths=(2,)):
    return SimpleNamespace(verdict=verdict, texts=[SimpleNamespace(tokens=tokens)], accepted_lengths=(lengths,))


@pytest.mark.parametrize(
    ("faulty", "outcome"),
    [
        (result(Verdict.FAIL, (1, 3)), FOUND),
        (result(Verdict.PASS), WITHOUT_EFFECT),
        (result(Verdict.PASS, (1, 3)), MISSED),
        (result(Verdict.PASS, lengths=(1, 1)), MISSED),
    ],
)
def test_an_outcome_is_of_tokens_and_steps(faulty, outcome):
    assert judge_alignment(faulty, result(Verdict.PASS)) == outcome


def test_missed_faults_are_counted_and_named():
    rows = [{"family": "llama", "seed": 0, "fault": name, "outcome": MISSED} for name in ("b", "a")]
    counted = count_missed([*rows, {"family": "llama", "seed": 0, "fault": "c", "outcome": FOUND}])
    assert (counted[FOUND], counted[MISSED], counted[WITHOUT_EFFECT]) == (1, 2, 0)
    assert counted["names"] == ["llama: a", "llama: b"]


def test_a_planted_fault_is_aligned():
    (row,) = measure_missed(("llama", 0, 1000, 3))
    assert (row["family"], row["outcome"]) == ("llama", FOUND)
