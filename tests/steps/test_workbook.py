"""The workbook runs notebooks as functions: checked before, stopped at the gate, never fooled by a clean exit."""

import json
import os
import shutil
import time
from pathlib import Path

import nbformat
import pytest
import yaml

from porting_kit.errors import EnvironmentMissing, HeadsError, PortFileError
from porting_kit.outcomes import Coverage, Verdict
from porting_kit.run_folder import STEPS
from porting_kit.steps.notebook_parameters import NotebookError
from porting_kit.steps.notebook_run import check_kernel, find_notebooks
from porting_kit.steps.workbook import format_workbook, run_workbook

FIXTURES = Path(__file__).parent.parent / "notebooks" / "fixtures"


@pytest.fixture
def port_file(tmp_path):
    file = tmp_path / "port.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", "base": "base", "heads": "heads"}))
    return file


@pytest.fixture
def run(tmp_path, port_file):
    """Run fixtures, given in order, as notebooks 00, 01, ... (05 for the last when `report` names one)."""

    def run_fixtures(*names: str, report: str | None = None, **options):
        folder = tmp_path / "workbook"
        folder.mkdir(exist_ok=True)
        for place, name in enumerate(names):
            shutil.copy(FIXTURES / f"{name}.ipynb", folder / f"{place:02d}_{name}.ipynb")
        if report:
            shutil.copy(FIXTURES / f"{report}.ipynb", folder / f"05_{report}.ipynb")
        options = {"notebooks": folder, "progress": False, "run_folder": tmp_path / "run", **options}
        return run_workbook(port_file, **options)

    return run_fixtures


def read_outcome(tmp_path: Path, step: str) -> dict:
    return json.loads((tmp_path / "run" / step / "outcome.json").read_text())


def executed_text(tmp_path: Path, step: str) -> str:
    (file,) = (tmp_path / "run" / step).glob("*.ipynb")
    return file.read_text()


def test_all_pass_and_parameters_reach_the_notebooks(run, tmp_path):
    result = run(*["passes"] * 5, report="passes", overrides={"dtype": "bfloat16", "target.tp_size": 1})
    assert (result.verdict, result.exit_code, result.failed_notebook) == (Verdict.PASS, 0, None)
    assert list(result.outcomes) == list(STEPS)
    assert result.outcome.covered == (Coverage.WEIGHTS,)
    assert read_outcome(tmp_path, "convert")["figures"]["dtype"] == "bfloat16"
    assert len(result.executed) == 6
    assert "verdict: pass" in format_workbook(result)
    notebook = nbformat.reads(executed_text(tmp_path, "preflight"), as_version=4)
    injected = next(cell.source for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", []))
    assert 'dtype = "bfloat16"' in injected
    assert 'overrides = {"target.tp_size": 1}' in injected
    assert f'run_folder = "{tmp_path}{os.sep}run"' in injected


def test_a_failing_gate_stops_the_later_notebooks_and_the_report_names_it(run, tmp_path, capsys):
    result = run("passes", "failing_gate", "passes", progress=True)
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 1)
    assert result.failing_gate == "tensor shapes"
    assert result.failed_notebook == "01_failing_gate.ipynb"
    assert "VerdictFailed" in executed_text(tmp_path, "patch")
    assert "three tensors do not fit" in executed_text(tmp_path, "patch")
    assert not list((tmp_path / "run" / "convert").glob("*.ipynb"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "tensor shapes" in page
    assert "three tensors do not fit" in page
    assert "tensor shapes" in format_workbook(result)
    assert "01_failing_gate" in capsys.readouterr().err


def test_keep_going_runs_the_later_notebooks_and_the_verdict_stays(run, tmp_path):
    result = run("failing_gate", "passes", keep_going=True)
    assert result.verdict is Verdict.FAIL
    assert read_outcome(tmp_path, "patch")["verdict"] == "pass"


@pytest.mark.parametrize(
    ("fixture", "gate", "summary"),
    [
        ("exits_zero", "SystemExit", "left through sys.exit"),
        ("exits_zero_before_gate", "tensor shapes", "three tensors do not fit"),
        ("failing_step_without_gate", "tensor shapes", "three tensors do not fit"),
        ("failing_after_its_step", "the seeded fault did not turn the verdict", "the seeded fault did not"),
        ("does_nothing", "NoOutcome", "without running its step"),
        ("kernel_dies", "KernelDied", "ernel died"),
    ],
)
def test_what_is_no_pass_does_not_count_as_one(run, tmp_path, fixture, gate, summary):
    result = run(fixture, "passes")
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 1)
    assert gate in result.failing_gate
    assert summary in result.outcome.summary
    assert read_outcome(tmp_path, "preflight")["verdict"] == "fail"
    assert list(result.outcomes) == ["preflight", "report"]
    assert summary in (tmp_path / "run" / "report.html").read_text()


def test_one_time_limit_for_a_whole_notebook(run, tmp_path):
    started = time.monotonic()
    result = run("never_ends", limit_s=5)
    assert time.monotonic() - started < 60
    assert result.verdict is Verdict.FAIL
    assert "took more than 5 s" in result.outcome.summary
    assert "took more than 5 s" in executed_text(tmp_path, "preflight")


def test_a_machine_that_lacks_something_is_exit_code_3(run, tmp_path):
    result = run("environment_missing", "passes")
    assert (result.verdict, result.exit_code) == (Verdict.NOT_RUN, 3)
    assert "no GPU here" in result.outcome.summary


def test_unusable_input_raises_its_own_kind_after_the_report_is_written(run, tmp_path):
    with pytest.raises(HeadsError, match="the heads file is cut off") as caught:
        run("unusable_input", "passes")
    assert caught.value.exit_code == 2
    assert "fetch it again" in str(caught.value)
    assert "the heads file is cut off" in (tmp_path / "run" / "report.html").read_text()


def test_an_earlier_run_is_not_taken_for_this_one(run, tmp_path):
    assert list(run("passes", "passes").outcomes) == ["preflight", "patch", "report"]
    shutil.rmtree(tmp_path / "workbook")
    result = run("exits_zero", "passes")
    assert result.verdict is Verdict.FAIL
    assert list(result.outcomes) == ["preflight", "report"]
    assert [file.name for file in result.executed.values()] == ["00_exits_zero.ipynb"]


def test_a_failing_report_notebook_fails_the_run_and_the_report_is_written(run, tmp_path):
    result = run("passes_every_step", report="exits_zero")
    assert result.verdict is Verdict.FAIL
    assert result.failed_notebook == "05_exits_zero.ipynb"
    assert "05_exits_zero" in result.failing_gate
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("fixture", ["foreign_kernel", "no_kernelspec"])
def test_the_kernel_named_in_the_file_does_not_matter(run, tmp_path, fixture):
    run(fixture)
    assert read_outcome(tmp_path, "preflight")["verdict"] == "pass"


@pytest.mark.parametrize(
    ("fixture", "options", "kind", "said"),
    [
        ("passes", {"overrides": {"target.tp_sise": 2}}, NotebookError, "target.tp_size"),
        ("passes", {"overrides": {"dtype": "float8"}}, PortFileError, "dtype"),
        ("passes", {"kernel_name": "venv-310-private"}, EnvironmentMissing, "ipykernel install"),
        ("untagged_parameters", {}, NotebookError, "no cells tagged"),
        ("two_tagged_cells", {}, NotebookError, "2 cells tagged"),
        ("lacks_a_parameter", {}, NotebookError, "'interactive'"),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_runs(run, tmp_path, fixture, options, kind, said):
    with pytest.raises(kind) as caught:
        run("passes", fixture, **options)
    assert said in str(caught.value)
    assert not list(tmp_path.glob("run/*/*.ipynb"))


def test_a_missing_kernel_is_named_with_the_command_that_registers_it():
    with pytest.raises(EnvironmentMissing) as caught:
        check_kernel("venv-310-private")
    fields = caught.value.as_dict()
    assert not any("\n" in str(value) for value in fields.values())  # no traceback of Jupyter's
    assert fields["next_step"].endswith("-m ipykernel install --user --name venv-310-private")
    check_kernel("python3")


def test_notebooks_are_found_by_their_numbers(tmp_path):
    for name in ("00_a", "03_b", "note"):
        shutil.copy(FIXTURES / "passes.ipynb", tmp_path / f"{name}.ipynb")
    assert [item.step for item in find_notebooks(tmp_path)] == ["preflight", "build"]
    shutil.copy(FIXTURES / "passes.ipynb", tmp_path / "09_c.ipynb")
    with pytest.raises(NotebookError, match="09_c"):
        find_notebooks(tmp_path)
    with pytest.raises(NotebookError, match="no notebooks"):
        find_notebooks(tmp_path / "nowhere")
