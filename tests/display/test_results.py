"""The steps' results as tables: what needs the reader comes first, and nothing is left out."""

import pytest

from porting_kit.display.results import (
    accounting_table,
    coverage_table,
    edits_table,
    field_table,
    gates_table,
    outcome_facts,
    steps_table,
    tensor_table,
)
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.patching.edits import Edit
from porting_kit.releases.kernels import GateResult


def test_gates_that_need_something_come_first_and_the_rest_is_folded():
    gates = [
        GateResult("mask", "causal", "pass", "causal", source="a.cpp"),
        GateResult("ALiBi", "alibi", "silent", "none", remedy="fold_alibi"),
        GateResult("head size", "64", "refused", "128", remedy="pad_head_size"),
    ]
    for rows in (gates, [gate.as_dict() for gate in gates]):
        html = gates_table(rows).to_html()
        assert html.index("head size") < html.index("ALiBi") < html.index("<details>") < html.index("mask")
        assert "1 gates pass" in html
    assert "Every gate passes." in gates_table(gates[:1]).to_html()


def test_dropped_and_defaulted_fields_come_first_and_are_counted():
    kinds = ("kept", "derived", "defaulted", "dropped")
    rows = [{"target": f"t{kind}", "value": kind, "source": None, "kind": kind, "note": ""} for kind in kinds]
    table = field_table(rows)
    assert [row[3] for row in table.rows] == ["dropped", "defaulted", "derived", "kept"]
    assert table.note == "1 dropped, 1 defaulted, 1 derived, 1 kept"


def test_every_tensor_is_in_one_row_of_the_account():
    sources = [
        {"name": "a", "targets": ["x"], "reason": ""},
        {"name": "b", "targets": [], "reason": "a buffer"},
    ]
    targets = [{"name": "x", "origin": "base"}, {"name": "y", "origin": "tied"}, {"name": "z", "origin": "heads"}]
    counts = {row[0]: row[1] for row in accounting_table(sources, targets).rows}
    assert counts["source tensors used"] + counts["source tensors dropped"] == len(sources)
    assert sum(count for name, count in counts.items() if name.startswith("target")) == len(targets)
    assert "a buffer" in str(accounting_table(sources, targets))


def test_ranks_are_counted_beside_a_shape():
    target = {"name": "x", "sources": ["a"], "operations": [], "shapes": [[4, 8], [4, 8]], "dtype": "float16"}
    assert "4 × 8 on each of 2 ranks" in str(tensor_table([target]))


def test_what_was_not_covered_is_said():
    outcome = StepOutcome("align", Verdict.PASS, "fine", covered=(Coverage.WEIGHTS,))
    assert "not covered" in str(outcome_facts(outcome))
    table = str(coverage_table(outcome.covered))
    assert table.count("not covered") == len(Coverage) - 1


def test_a_step_that_has_not_run_is_listed():
    table = steps_table({"preflight": StepOutcome("preflight", Verdict.PASS, "ok")}, ("preflight", "patch"))
    assert "– not run" in str(table)


EDIT = Edit("Layer", "forward", 3, "signature", ("a=None",))


@pytest.mark.parametrize(("edits", "said"), [((), "already passes"), ((EDIT,), "a=None")])
def test_edits_are_listed_or_said_to_be_none(edits, said):
    assert said in str(edits_table(edits))
