"""The steps' results as tables: what needs the reader comes first, and nothing is left out."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from porting_kit.display.alignment_view import divergence_facts
from porting_kit.display.results import (
    accounting_table,
    coverage_table,
    edits_table,
    field_table,
    gates_table,
    outcome_facts,
    pin_facts,
    steps_table,
    tensor_table,
)
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.patching.edits import Edit
from porting_kit.releases.kernels import GateResult
from porting_kit.releases.pinning import pin_release
from porting_kit.releases.shape import AttentionShape
from porting_kit.steps.align import AlignResult, describe_divergence, format_alignment
from porting_kit.steps.heads import format_check
from porting_kit.steps.heads_training import format_training
from porting_kit.steps.preflight import VALUE_COLUMNS, check_port_file, format_preflight, shorten


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


LLAMA = AttentionShape(head_size=128, query_heads=32, kv_heads=32, dtype="float16", compute_capability=90)
BLOOM = AttentionShape(128, 32, 32, "float16", position_kind="alibi", compute_capability=90)
DEMO_PORT = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini.yaml"
NONE_TAKES_IT = "none takes the model as it is"


def test_a_release_is_named_only_where_one_takes_the_model():
    assert NONE_TAKES_IT not in str(pin_facts(pin_release(LLAMA)))
    bloom = str(pin_facts(pin_release(BLOOM)))
    assert NONE_TAKES_IT in bloom
    assert "fold_alibi" in bloom, "what would mend it"


def test_preflight_in_a_terminal_says_when_no_kernel_was_judged(tmp_path):
    text = format_preflight(check_port_file(DEMO_PORT, run_folder=tmp_path))
    assert "kernels: not judged" in text
    assert f"release to build with: {NONE_TAKES_IT}" in text
    judged = format_preflight(
        check_port_file(DEMO_PORT, run_folder=tmp_path, overrides={"kernel": "release:0.13.0", "fit": "auto"})
    )
    assert "not judged" not in judged
    assert NONE_TAKES_IT not in judged


def test_a_value_that_was_cut_is_marked():
    assert shorten("a" * VALUE_COLUMNS) == "a" * VALUE_COLUMNS
    assert shorten("a" * (VALUE_COLUMNS + 1)) == "a" * (VALUE_COLUMNS - 1) + "…"


@pytest.mark.parametrize("fit", [None, "write_positions (exact)"])
def test_an_alignment_names_the_kernel_fit_it_was_made_with(fit):
    text = format_alignment(AlignResult(StepOutcome("align", Verdict.PASS, "ok", figures={"fit": fit}), None))
    assert ("kernel fit in effect: write_positions (exact)" in text) == (fit is not None)


def test_the_tables_of_the_heads_commands_count_from_one():
    shares = {"top1": 0.5, "top5": 0.8, "chance1": 0.1, "positions": 9, "verdict": "fits"}
    readings = [SimpleNamespace(head=head, **shares) for head in range(2)]
    check = SimpleNamespace(
        fit=SimpleNamespace(readings=readings, notes=()),
        outcome=StepOutcome("heads check", Verdict.PASS, "ok", figures={"warnings": []}),
    )
    trained = SimpleNamespace(trained=SimpleNamespace(accuracy=readings), outcome=check.outcome, folder="heads")
    for text in (format_check(check), format_training(trained)):
        assert [line.split()[0] for line in text.splitlines()[1:3]] == ["1", "2"]


@pytest.mark.parametrize(
    ("proposer", "shown"), [("head 0", "head 1 (tensors medusa_heads.0)"), ("base", "base"), (None, None)]
)
def test_heads_are_counted_from_one_where_a_reader_looks(proposer, shown):
    names = ("prompt", "position", "phase", "emitted", "preferred", "margin")
    first = {**dict.fromkeys(names, 1), "kind": "wrong", "proposed_by": proposer}
    pairs = dict(divergence_facts({"rows": [], "first_divergence": first}).pairs)
    assert pairs.get("proposed by") == shown


@pytest.mark.parametrize(
    ("phase", "said"), [("depth 2", "position 5, depth 2: token 7"), (None, "position 5: token 7")]
)
def test_the_first_divergence_is_a_sentence_in_a_terminal(phase, said):
    first = {
        "prompt": 3,
        "position": 5,
        "phase": phase,
        "emitted": 7,
        "preferred": 9,
        "margin": -1.25,
        "kind": "near_tie",
    }
    text = describe_divergence(first)
    assert text.startswith("prompt 3, " + said)
    assert text.endswith("the base prefers 9 by 1.25 logits (near-tie)")
