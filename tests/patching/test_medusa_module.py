"""What a user takes away: the module for --model_cls_file, and the diff that git applies and reverses."""

from __future__ import annotations

import ast
import shutil
import subprocess

import pytest

from porting_kit.errors import PatchError, SourceTreeError
from porting_kit.patching import ReleaseTooOld, build_medusa_module, find_dropped_arguments, write_patch
from porting_kit.patching.diff import unified_diff
from porting_kit.patching.medusa_module import make_imports_absolute, read_source
from porting_kit.source_tree import SourceTree, open_source_tree

ARCHITECTURES = ("BloomForCausalLM", "GPTNeoXForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def bundled() -> SourceTree:
    return open_source_tree("bundled")


def copy_tree(tree: SourceTree, folder) -> SourceTree:
    """A copy of what patching looks at."""
    for part in ("models", "layers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(tree.package / part, folder / "tensorrt_llm" / part, ignore=ignored)
    shutil.copy(tree.package / "version.py", folder / "tensorrt_llm")
    return open_source_tree(folder)


def snapshot(tree: SourceTree) -> dict[str, bytes]:
    files = (file for file in tree.root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(tree.root)): file.read_bytes() for file in files}


def git_apply(folder, patch, *options) -> None:
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_module_is_self_contained(bundled, architecture):
    before = snapshot(bundled)
    module = build_medusa_module(bundled, architecture)
    assert snapshot(bundled) == before, "the tree itself was edited"
    parsed = ast.parse(module.source)
    assert not [node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom) and node.level]
    classes = {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}
    assert [ast.unparse(base) for base in classes[module.class_name].bases] == [module.base_class_name]
    assert find_dropped_arguments(module.source, bundled.spec_arguments) == ()
    if architecture != "LlamaForCausalLM":
        assert "llama" not in module.source.lower()
        assert module.outcome.status == "patched"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_diff_applies_and_reverses(bundled, architecture, tmp_path):
    tree = copy_tree(bundled, tmp_path / "tree")
    before = snapshot(tree)
    module = build_medusa_module(bundled, architecture)
    module_file, patch = write_patch(module, tmp_path / "patched")
    assert module_file.name == f"medusa_{bundled.find_model(architecture).file.parent.name}.py"
    assert read_source(module_file) == module.source

    git_apply(tree.root, patch)
    base = tree.find_model(architecture)
    assert read_source(base.file) == module.outcome.source
    registered = tree.find_model(module.class_name)
    assert (registered.class_name, registered.file) == (module.class_name, base.file.with_name("medusa.py"))
    assert find_dropped_arguments(read_source(base.file), tree.spec_arguments) == ()
    compile(read_source(registered.file), str(registered.file), "exec")

    git_apply(tree.root, patch, "--reverse")
    assert snapshot(tree) == before


def test_a_patched_tree_is_left_as_it_is(bundled, tmp_path):
    tree = copy_tree(bundled, tmp_path / "tree")
    _, patch = write_patch(build_medusa_module(tree, "BloomForCausalLM"), tmp_path)
    git_apply(tree.root, patch)
    again = build_medusa_module(tree, "BloomForCausalLM")
    assert again.outcome.status == "already_accepts"
    assert again.diff == ""


def test_refused_and_unknown_architectures_say_why(bundled, tmp_path):
    with pytest.raises(PatchError, match="defines no decoder layer"):
        build_medusa_module(bundled, "MedusaForCausalLM")
    with pytest.raises(SourceTreeError, match="BloomForCausalLM"):
        build_medusa_module(bundled, "BloomForCausalLm")


def test_shared_classes_must_hand_the_arguments_on(bundled, tmp_path):
    tree = copy_tree(bundled, tmp_path)
    shared = tree.package / "models" / "modeling_utils.py"
    text = shared.read_text(encoding="utf-8")
    shared.write_text(text.replace("        spec_decoding_params=None,\n", "", 1), encoding="utf-8")
    with pytest.raises(ReleaseTooOld, match="DecoderLayerList"):
        build_medusa_module(tree, "BloomForCausalLM")


def test_a_model_in_a_folder_of_a_folder_is_registered_there(bundled, tmp_path):
    """As phi3/phi3small/model.py of 0.11.0.dev2024060400."""
    tree = copy_tree(bundled, tmp_path / "tree")
    models = tree.package / "models"
    (models / "family").mkdir()
    (models / "bloom").rename(models / "family" / "bloom")
    file = models / "family" / "bloom" / "model.py"
    for path, old, new in ((file, "from ...", "from ...."), (file, "from ..modeling", "from ...modeling")):
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    init = models / "__init__.py"
    init.write_text(init.read_text(encoding="utf-8").replace("from .bloom.", "from .family.bloom."), encoding="utf-8")
    module = build_medusa_module(open_source_tree(tree.root), "BloomForCausalLM")
    _, patch = write_patch(module, tmp_path)
    git_apply(tree.root, patch)
    registered = open_source_tree(tree.root).find_model(module.class_name)
    assert registered.file == file.with_name("medusa.py")
    assert f"from .family.bloom.medusa import {module.class_name}" in init.read_text(encoding="utf-8")


def test_inputs_follow_the_release(bundled, tmp_path):
    """Before 0.10.0.dev2024050700 the model class makes the tree's inputs; later the library does."""
    tree = copy_tree(bundled, tmp_path)
    shared = tree.package / "models" / "modeling_utils.py"
    text = shared.read_text(encoding="utf-8")
    known = text.replace(
        "def prepare_inputs(self, *args, **kwargs):",
        "def prepare_inputs(self, max_batch_size, max_draft_len=0, speculative_decoding_draft_tokens_external=False):",
    )
    shared.write_text(known, encoding="utf-8")
    late = build_medusa_module(tree, "BloomForCausalLM").source
    assert "kwargs['speculative_decoding_draft_tokens_external'] = False" in late
    assert "name='medusa_packed_mask'" not in late

    shared.write_text(known.replace(", speculative_decoding_draft_tokens_external=False", ""), encoding="utf-8")
    (tree.package / "models" / "generation_mixin.py").touch()  # what the bundled tree has none of: engine inputs
    early = build_medusa_module(tree, "BloomForCausalLM").source
    assert "speculative_decoding_draft_tokens_external" not in early
    assert "kwargs['max_draft_len'] = self.max_medusa_token_len" in early
    assert "name='medusa_packed_mask'" in early

    shared.write_text(text.replace("def prepare_inputs(self, *args, **kwargs)", "def prepare_inputs(self)"), "utf-8")
    assert "max_draft_len']" not in build_medusa_module(tree, "BloomForCausalLM").source


def test_relative_imports_become_absolute():
    source = (
        "from ..._utils import (a,\n    b)\nfrom ..modeling_utils import c\nfrom .config import d\nfrom . import e\n"
        "from .. import f\nimport torch\nfrom tensorrt_llm.x import g\n\ndef h():\n    from ...functional import i\n"
    )
    assert make_imports_absolute(source, "tensorrt_llm.models.bloom") == (
        "from tensorrt_llm._utils import (a,\n    b)\nfrom tensorrt_llm.models.modeling_utils import c\n"
        "from tensorrt_llm.models.bloom.config import d\nfrom tensorrt_llm.models.bloom import e\n"
        "from tensorrt_llm.models import f\nimport torch\nfrom tensorrt_llm.x import g\n\ndef h():\n"
        "    from tensorrt_llm.functional import i\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\nb", "a\nb\nc"),
        ("a\nb\n", "a\nb"),
        ("a\x0cb\r\nc\u2028d\n", "a\x0cb\r\nc\u2028e\n"),
        (None, "new\nfile\n"),
        (None, "no newline"),
    ],
)
def test_diff_reproduces_any_text(before, after, tmp_path):
    file = tmp_path / "folder" / "file.py"
    file.parent.mkdir()
    if before is not None:
        file.write_bytes(before.encode())
    patch = tmp_path / "p.patch"
    patch.write_bytes(unified_diff("folder/file.py", before, after).encode())
    git_apply(tmp_path, patch)
    assert file.read_bytes() == after.encode()
    git_apply(tmp_path, patch, "--reverse")
    assert file.read_bytes() == before.encode() if before is not None else not file.exists()


def test_no_change_is_an_empty_diff():
    assert unified_diff("x.py", "same\n", "same\n") == ""
