"""The project's own notebooks, run headless on the embedded port: a pass, and a gate that stops them."""

import json
from pathlib import Path

import nbformat
import pytest

from porting_kit.outcomes import Coverage, Verdict
from porting_kit.run_folder import STEPS
from porting_kit.steps.notebook_run import notebooks_folder
from porting_kit.steps.workbook import run_workbook

PORT = notebooks_folder() / "ports" / "bloom-mini.yaml"
SHORT = {
    "alignment.prompts": ["Return the number of", "The first argument must be a list of strings, and the second"],
    "alignment.new_tokens": 10,
    "alignment.batch_sizes": [2],
}


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "bloom-mini"
    return run_workbook(PORT, run_folder=folder, overrides=SHORT, progress=False), folder


def cells_of(file: Path):
    return nbformat.read(file, as_version=4).cells


def outputs_of(file: Path):
    return [output for cell in cells_of(file) if cell.cell_type == "code" for output in cell.outputs]


def test_every_notebook_ran_and_the_verdict_is_pass(passed):
    result, _ = passed
    assert (result.verdict, result.exit_code, result.failed_notebook) == (Verdict.PASS, 0, None)
    assert sorted(file.name for file in result.executed.values()) == [
        file.name for file in sorted(notebooks_folder().glob("*.ipynb"))
    ]
    assert set(result.outcome.covered) == {Coverage.WEIGHTS, Coverage.MODEL_CODE, Coverage.TREE_AND_ACCEPTANCE}
    assert result.outcomes["build"].verdict in (Verdict.NOT_RUN, Verdict.PASS)


def test_each_step_left_a_readable_outcome(passed):
    _, folder = passed
    for step in STEPS:
        outcome = json.loads((folder / step / "outcome.json").read_text())
        assert outcome["summary"]
        assert set(outcome["covered"]) | set(outcome["not_covered"]) == {item.value for item in Coverage}
    alignment = json.loads((folder / "alignment" / "alignment.json").read_text())
    assert alignment["tokens_equal"]
    assert alignment["tokens_per_step"] > 1
    assert json.loads((folder / "alignment" / "control.json").read_text())["has_turned"]


def test_headless_outputs_need_no_script_and_no_widget(passed):
    result, _ = passed
    for file in result.executed.values():
        for output in outputs_of(file):
            assert output.output_type in ("display_data", "execute_result", "stream")
            data = output.get("data", {})
            assert "application/vnd.jupyter.widget-view+json" not in data, file.name
            assert "<script" not in data.get("text/html", "")
            assert output.output_type == "stream" or data["text/plain"]


@pytest.mark.parametrize(("step", "pictures"), [("preflight", 1), ("align", 1)])
def test_pictures_say_in_words_what_they_show(passed, step, pictures):
    result, _ = passed
    shown = [output for output in outputs_of(result.executed[step]) if "image/png" in output.get("data", {})]
    assert len(shown) >= pictures
    assert all(output.metadata["image/png"]["alt"] for output in shown)


def test_a_warned_port_stops_at_the_first_gate_and_says_why(tmp_path):
    overrides = {"kernel": "release:0.11.0.dev2024062500", "fit": "off"}
    result = run_workbook(PORT, run_folder=tmp_path / "run", overrides=overrides, progress=False)
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 1)
    assert (result.failing_gate, result.failed_notebook) == ("ALiBi", "00_preflight.ipynb")
    assert set(result.executed) == {"preflight", "report"}
    assert any("papermill-error-cell" in cell.source for cell in cells_of(result.executed["preflight"]))
    page = result.report.read_text()
    assert "ALiBi" in page
    assert "fold_alibi" in page[: page.index("<main>")]
