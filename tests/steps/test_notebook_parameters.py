"""The parameters cell is the contract between a notebook and who runs it; papermill alone does not keep it."""

from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from porting_kit.steps.notebook_parameters import (
    NotebookError,
    collect_settings,
    parse_parameters,
    read_parameters,
    refuse_injected_typos,
    refuse_unknown_names,
)

FIXTURES = Path(__file__).parent.parent / "notebooks" / "fixtures"


def read_fixture(name: str) -> dict:
    file = FIXTURES / f"{name}.ipynb"
    return read_parameters(nbformat.read(file, as_version=4), file)


def test_a_good_cell_gives_names_defaults_types_and_help():
    parameters = read_fixture("passes")
    assert parameters["interactive"].default is False
    assert parameters["dtype"].annotation == "str"
    assert parameters["overrides"].help == "fields of the port file"


def test_a_line_that_holds_two_equal_signs_is_read():
    parameters = parse_parameters('condition: str = "a=b"  # with = in it', "cell")
    assert parameters["condition"].default == "a=b"
    assert parameters["condition"].help == "with = in it"


@pytest.mark.parametrize(
    ("fixture", "said"),
    [
        ("untagged_parameters", "has no cells tagged 'parameters'"),
        ("two_tagged_cells", "has 2 cells tagged 'parameters'"),
        ("parameters_not_first", "is not its first code cell"),
        ("derived_parameter", "no plain typed literal"),
    ],
)
def test_a_wrong_parameters_cell_is_refused(fixture, said):
    with pytest.raises(NotebookError) as caught:
        read_fixture(fixture)
    assert said in caught.value.subject
    assert fixture in caught.value.where


@pytest.mark.parametrize("source", ["size = 2", "size: int", "size: int = 2 + n", "import os", "a: int = (b := 3)"])
def test_only_typed_literals_are_allowed(source):
    with pytest.raises(NotebookError, match="no plain typed literal"):
        parse_parameters(source, "cell")


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(NotebookError) as caught:
        refuse_unknown_names(["tp_sise"], ["dtype", "tp_size"], "here")
    assert caught.value.expected == "did you mean 'tp_size'?"
    refuse_unknown_names(["tp_size"], ["dtype", "tp_size"], "here")


def test_what_papermill_injects_is_checked_and_a_hand_run_is_not():
    declaring = 'dtype: str = "float16"  # format'
    refuse_injected_typos(["", declaring, 'dtype = "bfloat16"', "dtyp = 1"])
    refuse_injected_typos(["", declaring, '# Parameters\ndtype = "bfloat16"\n'])
    with pytest.raises(NotebookError, match="'dtyp'"):
        refuse_injected_typos(["", declaring, '# Parameters\ndtyp = "bfloat16"\n'])


def test_empty_settings_say_nothing_and_false_does():
    given = collect_settings({"target.tp_size": 2}, kernel="", dtype=None, fit=False, engine="captured")
    assert given == {"target.tp_size": 2, "fit": False, "engine": "captured"}


@pytest.mark.parametrize(
    "file", sorted((FIXTURES.parents[2] / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem
)
def test_papermill_sees_every_parameter_of_the_workbook(file):
    notebook = nbformat.read(file, as_version=4)
    assert set(papermill.inspect_notebook(str(file))) == set(read_parameters(notebook, file))


def test_a_notebook_run_by_papermill_itself_refuses_a_misspelt_name(tmp_path):
    notebook = FIXTURES / "refuses_typos.ipynb"
    with pytest.raises(PapermillExecutionError) as caught:
        papermill.execute_notebook(notebook, tmp_path / "out.ipynb", {"dtyp": "bfloat16"}, progress_bar=False)
    assert caught.value.ename == "NotebookError"
    assert "did you mean 'dtype'?" in caught.value.evalue
