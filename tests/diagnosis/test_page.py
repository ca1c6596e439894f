"""The pages follow the catalogue and the measured rates: nothing is said twice, and nothing goes stale."""

import json

from porting_kit.diagnosis.catalogue import CATALOGUE
from tests.benchmarks import diagnosis_page
from tests.benchmarks.diagnosis import LOGITS, TOKENS, build_confusion, count_rates
from tests.diagnosis.foreign_rates import count_outcomes
from tests.diagnosis.missed_faults import MISSED, count_missed
from tests.diagnosis.planted_faults import NOT_PLANTED


def test_the_committed_pages_are_what_the_command_writes():
    for name, text in diagnosis_page.build_pages().items():
        file = diagnosis_page.HOWTO / name
        assert file.read_text(encoding="utf-8") == text, f"{name}: run python -m tests.benchmarks.diagnosis_page"


def test_every_fault_is_on_the_page_once_under_the_phase_it_shows_in():
    page = diagnosis_page.write_symptoms()
    for fault in CATALOGUE:
        assert page.count(f"\n`{fault.name}` (") == 1
    titles = [title for _, title, _ in diagnosis_page.PHASES]
    places = [page.index(f"## {title}") for title in titles]
    assert places == sorted(places)
    generation = page[places[2] : places[3]]
    assert "`alibi_dropped_in_generation`" in generation
    assert "`qkv_bias_dropped`" not in generation


def row(fault, named, ties=(), to_explain=5, rank=1, source=LOGITS):
    found = {"fault": fault, "named": named, "ties": list(ties), "to_explain": to_explain, "rank": rank, "seconds": 1.0}
    return {"from": source, "family": "bloom", "seed": 0, **found}


def test_a_tie_and_a_wrong_name_lower_the_rate_and_a_case_without_effect_does_not_count():
    rows = [row("a", "a"), row("b", "b", ties=["c"]), row("c", "a", rank=2), row("d", None, to_explain=0, rank=None)]
    rates = count_rates(rows)
    assert (rates["cases"], rates["without_effect"], rates["tied"]) == (3, 1, 1)
    assert (rates["top1"], rates["top3"]) == (round(1 / 3, 4), 1.0)
    assert build_confusion(rows)["d"] == {"nothing to explain": 1}
    assert build_confusion(rows)["b"] == {"b (tied)": 1}
    assert count_rates([row("a", "b", rank=4)])["top3"] == 0


def test_the_rates_page_prints_every_failure():
    rows = [row("qkv_bias_dropped", "qkv_bias_dropped"), row("rope_base_lost", None, rank=None)]
    rates = {
        "families": ["bloom"], "seeds": 1, "false_alarms": 0, "clean_ports": 3, "near_ties": {},
        "made": "2026-11-30", "workers": 2, "seconds": 3.0,
        LOGITS: count_rates(rows), TOKENS: count_rates(rows), "failures": rows[1:],
        "confusion": {LOGITS: build_confusion(rows), TOKENS: build_confusion(rows)},
        "alignment": count_missed([{"family": "bloom", "fault": "norm_epsilon_wrong", "outcome": MISSED}]),
    }  # fmt: skip
    page = diagnosis_page.write_rates(json.loads(json.dumps(rates)))
    assert "50.0%" in page
    assert "0 of 3 clean ports" in page
    assert "`rope_base_lost` was called none of these" in page
    assert "the alignment failed on 0 of 1 faults" in page
    assert "- bloom: norm_epsilon_wrong" in page


def test_the_page_lists_every_kind_that_was_not_planted_with_the_reason():
    planted = {fault.name: {} for fault in CATALOGUE if fault.name not in NOT_PLANTED}
    lines = diagnosis_page.write_not_planted(planted)
    assert all(f"- `{name}`: {reason}" in lines for name, reason in NOT_PLANTED.items())
    del planted["qkv_bias_dropped"]
    assert "- `qkv_bias_dropped`: not in the catalogue when this was measured" in diagnosis_page.write_not_planted(
        planted
    )
    assert diagnosis_page.write_not_planted(dict.fromkeys(fault.name for fault in CATALOGUE)) == []


def test_the_page_tells_engines_made_by_hand_from_planted_faults():
    row = {
        "from": LOGITS, "base": "llama", "engine": "int4", "question": "not in the catalogue", "outcome": "wrong",
        "said": "norm_epsilon_wrong", "to_explain": 9, "observed": 72,
    }  # fmt: skip
    rows = [row, {**row, "outcome": "right"}]
    foreign = {"cases": 2, "bases": ["llama"], "outcomes": count_outcomes(rows), "not_right": rows[:1]}
    page = "\n".join(diagnosis_page.write_foreign(foreign))
    assert f"| {LOGITS} | not in the catalogue | 1 | 0 | 0 | 1 |" in page
    assert "int4: wrong name (`norm_epsilon_wrong`; 9 of 72 to explain)" in page
