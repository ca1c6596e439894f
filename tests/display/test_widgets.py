"""Widgets start from the parameters, write back to plain attributes, and are never all there is to see."""

import subprocess
import sys

import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell

from porting_kit.display.widgets import PortForm, walk_hunks, walk_trees
from porting_kit.errors import PortFileError
from porting_kit.medusa.tree import read_tree
from porting_kit.port import load_port
from porting_kit.steps.context import open_port_run

DIFF = "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n one\n+two\n@@ -9 +10 @@\n-old\n+new\n"


@pytest.fixture
def make_form(tmp_path):
    file = tmp_path / "port.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", "base": "base", "heads": "heads"}))

    def make(interactive=True, **overrides):
        run = open_port_run(file, run_folder=tmp_path / "run", overrides=overrides)
        return PortForm(run, overrides, interactive=interactive)

    return make


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, as a list of objects."""
    objects = []

    class Handle:
        def update(self, item):
            objects.append(item)

    def display(item, display_id=None):
        objects.append(item)
        return Handle()

    InteractiveShell.clear_instance()
    monkeypatch.setattr("IPython.display.display", display)
    return objects


def test_the_form_starts_from_the_injected_parameter(make_form):
    form = make_form(dtype="bfloat16")
    assert form.inputs["dtype"].value == "bfloat16"
    assert form.open_run().port.dtype == "bfloat16"
    assert "bfloat16" in form.table().to_html()
    (row,) = [line for line in str(form.table()).splitlines() if line.startswith("dtype")]
    assert row.split()[1:3] == ["bfloat16", "parameter"]


def test_headless_uses_the_parameter_and_shows_it_without_script(make_form, shown):
    form = make_form(interactive=False, dtype="bfloat16")
    form._ipython_display_()
    assert form.inputs == {}
    (table,) = shown
    assert "bfloat16" in table.to_html()
    assert "<script" not in table.to_html()
    assert form.open_run() is form.run


def test_a_choice_is_written_back_and_the_table_follows(make_form, shown):
    form = make_form()
    form._ipython_display_()
    assert len(shown) == 2
    form.inputs["dtype"].value = "float32"
    form.inputs["target.max_batch_size"].value = 2
    form.inputs["tree"].value = "[[0], [1]]"
    assert form.changes == {"dtype": "float32", "target.max_batch_size": 2, "tree": [[0], [1]]}
    port = form.open_run().port
    assert (port.dtype, port.target.max_batch_size, port.tree) == ("float32", 2, [[0], [1]])
    assert "this form" in str(shown[-1])
    form.inputs["dtype"].value = "float16"
    assert "dtype" not in form.changes


def test_every_literal_of_the_port_file_is_offered(make_form):
    form = make_form()
    assert {"float16", "bfloat16", "float32"} <= set(form.inputs["dtype"].options)
    assert {"auto", "off"} == set(form.inputs["fit"].options)
    assert {"emulator", "tensorrt_llm", "captured"} <= set(form.inputs["engine"].options)


def test_every_input_says_what_it_means(make_form):
    form = make_form()
    meanings = {name: widget.tooltip for name, widget in form.inputs.items()}
    assert len(set(meanings.values())) == len(meanings) == len(form.table().parts[0].rows)
    assert all(meaning in str(form.table().to_html()) for meaning in meanings.values() if "'" not in meaning)


def test_a_choice_the_port_file_cannot_take_is_refused_when_it_is_used(make_form):
    form = make_form()
    form.inputs["tree"].value = "[[0], [first]]"
    with pytest.raises(PortFileError, match="tree"):
        form.open_run()


def test_saving_writes_a_port_file_with_the_choice(make_form, tmp_path):
    form = make_form(kernel="exact")
    form.inputs["dtype"].value = "bfloat16"
    file = form.save()
    assert file.parent == tmp_path
    assert load_port(file).dtype == "bfloat16"
    assert load_port(tmp_path / "port.yaml").dtype == "float16"


def test_walking_hunks_shows_one_at_a_time_and_the_whole_diff_always(shown):
    walker = walk_hunks(DIFF, interactive=True)
    walker._ipython_display_()
    assert len(shown) == 2
    assert "two" in walker.view.value
    assert "new" not in walker.view.value
    walker.slider.value = 2
    assert "new" in walker.view.value
    assert "two" in shown[1].to_html()
    assert "new" in shown[1].to_html()


def test_the_buttons_stop_at_both_ends():
    walker = walk_hunks(DIFF, interactive=True)
    back, forward = walker.box.children[0].children[:2]
    back.click()
    assert walker.slider.value == 1
    forward.click()
    forward.click()
    assert walker.slider.value == 2


def test_walking_trees_draws_each_step(shown):
    tree = read_tree([[0], [1], [0, 0]])
    walker = walk_trees(tree, [[0], [0, 1, 3]], ["a", "bcd"], interactive=True)
    first = walker.view.value
    walker.slider.value = 2
    assert walker.view.value != first
    assert "data:image/png" in walker.view.value
    walker._ipython_display_()
    assert "bcd" in shown[-1].to_html()
    assert "data:image/png" in shown[-1].to_html()


def test_headless_walkers_have_no_widget_and_show_the_twin(shown):
    walker = walk_hunks(DIFF, interactive=False)
    walker._ipython_display_()
    assert walker.box is None
    assert len(shown) == 1
    assert walk_hunks("", interactive=True).box is None


def test_headless_does_not_import_ipywidgets():
    code = (
        "import sys; from porting_kit.display.widgets import walk_hunks; walk_hunks('', interactive=False); "
        "sys.exit('ipywidgets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
