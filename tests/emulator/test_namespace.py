"""The import namespace: nothing of the user's interpreter changes, trees do not mix, unknown symbols are named."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from porting_kit.emulator import EmulatedModel, Emulator, open_emulator
from porting_kit.errors import EmulatorError
from porting_kit.source_tree import BUNDLED_ROOT, open_source_tree
from tests.emulator.test_model import PROMPT


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    """A copy of the bundled tree that a test may change."""
    shutil.copytree(BUNDLED_ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tree"


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))


def test_interpreter_is_as_before(
    build: Callable[..., EmulatedModel], cases: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real tensorrt_llm of the user stays what it is, and no module of the tree is left behind."""
    cases("bloom")  # the reference imports transformers, which changes sys.meta_path
    theirs = ModuleType("tensorrt_llm")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", theirs)
    before = {name: id(module) for name, module in sys.modules.items()}
    path, hooks = list(sys.path), list(sys.meta_path)
    model = build("bloom")
    model.prefill([PROMPT], model.new_cache(1, 16))
    assert sys.modules["tensorrt_llm"] is theirs
    changed = {
        name
        for name, module in sys.modules.items()
        if before.get(name) != id(module) and name.partition(".")[0] in ("tensorrt_llm", "tensorrt", "models")
    }
    assert not changed
    assert (sys.path, sys.meta_path) == (path, hooks)


def test_activate_restores_what_was_there(emulator: Emulator) -> None:
    theirs = sys.modules.get("tensorrt_llm")
    with emulator.namespace.activate():
        import tensorrt_llm.functional as functional

        assert functional is emulator.namespace.modules["tensorrt_llm.functional"]
    assert sys.modules.get("tensorrt_llm") is theirs
    assert "tensorrt_llm.functional" not in sys.modules


def test_two_trees_run_side_by_side(copied_tree: Path, emulator: Emulator, cases: Callable) -> None:
    """A changed copy of a tree and the tree itself keep their own code, whatever the order of their calls."""
    _, config, tensors = cases("llama")
    edit(copied_tree / "tensorrt_llm" / "functional.py", "return input * sigmoid(input)", "return input * tanh(input)")
    other = open_emulator(open_source_tree(copied_tree))
    models = [emulator.build_model(config, tensors), other.build_model(config, tensors)]
    caches = [model.new_cache(1, 16) for model in models]
    logits = [model.prefill([PROMPT], cache).logits for model, cache in zip(models, caches, strict=True)]
    again = [model.prefill([PROMPT], cache).logits for model, cache in zip(models, caches, strict=True)][::-1]
    assert (logits[0] - logits[1]).abs().max() > 1e-2
    assert torch.equal(again[1], logits[0])
    assert torch.equal(again[0], logits[1])


def test_nothing_is_written_to_the_tree(copied_tree: Path, cases: Callable) -> None:
    before = sorted(copied_tree.rglob("*"))
    _, config, tensors = cases("llama")
    open_emulator(open_source_tree(copied_tree)).build_model(config, tensors)
    assert sorted(copied_tree.rglob("*")) == before


def test_unused_imports_never_matter_and_used_ones_are_named(copied_tree: Path, cases: Callable) -> None:
    """Names that exist nowhere: an import, an annotation, a default and a base class are fine; a call is not."""
    file = copied_tree / "tensorrt_llm" / "models" / "llama" / "model.py"
    text = file.read_text()
    header = textwrap.dedent(
        """\
        import a_package_nobody_has as nobody
        import tensorrt as trt
        from another_missing_package.part import Thing, make_thing
        from ...runtime.session import Session


        class Child(Thing):
            def method(self, value: Thing | None = make_thing) -> trt.NoSuchType: ...


        TABLE = {trt.NoSuchEnum.A: nobody.deep.attribute}


        """
    )
    file.write_text(header + text)
    _, config, tensors = cases("llama")
    model = open_emulator(open_source_tree(copied_tree)).build_model(config, tensors)
    model.prefill([PROMPT], model.new_cache(1, 16))

    edit(
        file,
        "class LLaMAModel(Module):",
        "def use_it():\n    return nobody.deep.attribute(3)\n\n\nclass LLaMAModel(Module):",
    )
    module = open_emulator(open_source_tree(copied_tree)).namespace.import_module("tensorrt_llm.models.llama.model")
    with pytest.raises(EmulatorError) as caught:
        module.use_it()
    line = file.read_text().splitlines().index("    return nobody.deep.attribute(3)") + 1
    assert "a_package_nobody_has.deep.attribute" in caught.value.subject
    assert f"{file}:{line}" in caught.value.where


def test_operation_that_is_not_emulated_names_symbol_file_and_line(copied_tree: Path, cases: Callable) -> None:
    functional = copied_tree / "tensorrt_llm" / "functional.py"
    functional.write_text(
        functional.read_text()
        + textwrap.dedent(
            """

            def fancy_op(input):
                from ._common import default_net

                layer = default_net().trt_network.add_fancy(input)
                return layer
            """
        )
    )
    file = copied_tree / "tensorrt_llm" / "models" / "llama" / "model.py"
    edit(file, "class LLaMAModel(Module):", "from ...functional import fancy_op\n\n\nclass LLaMAModel(Module):")
    before = "hidden_states = self.layers"
    edit(file, before, f"fancy_op(hidden_states)\n        {before}")
    _, config, tensors = cases("llama")
    model = open_emulator(open_source_tree(copied_tree)).build_model(config, tensors)
    with pytest.raises(EmulatorError) as caught:
        model.prefill([PROMPT], model.new_cache(1, 16))
    line = file.read_text().splitlines().index("        fancy_op(hidden_states)") + 1
    assert "add_fancy" in caught.value.subject
    assert f"{file}:{line}" in caught.value.where
    assert "functional.py" in caught.value.where


def test_an_error_of_the_named_module_itself_is_not_hidden(copied_tree: Path, cases: Callable) -> None:
    file = copied_tree / "tensorrt_llm" / "models" / "llama" / "model.py"
    file.write_text("raise ZeroDivisionError('at import')\n")
    namespace = open_emulator(open_source_tree(copied_tree)).namespace
    with pytest.raises(ZeroDivisionError, match="at import"):
        namespace.import_module("tensorrt_llm.models.llama.model")
    with pytest.raises(EmulatorError, match="no module tensorrt_llm"):
        namespace.import_module("tensorrt_llm.models.nothing")


def test_opening_a_tree_does_not_import_transformers() -> None:
    """A model definition imports without the heavy packages that its converters need."""
    code = (
        "import sys; from porting_kit.emulator import open_emulator; from porting_kit.source_tree import *; "
        "open_emulator(open_source_tree('bundled')).find_model_class('BloomForCausalLM'); "
        "print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
