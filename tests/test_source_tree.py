"""Finding a source tree: what it is, what it holds, and what is said when it is not one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from porting_kit.errors import EnvironmentMissing, SourceTreeError
from porting_kit.source_tree import BUNDLED_ROOT, ModelClass, open_source_tree

ATTENTION = "class Attention(Module):\n    def forward(self, hidden_states, use_cache=False, {spec}):\n        pass\n"
MODELS = """
from .plain.model import PlainForCausalLM
from .renamed import Inner as OuterForCausalLM
from .wide.config import WIDE
from .wide.model import WideForCausalLM
from elsewhere import Gone

MODEL_MAP = {
    'PlainForCausalLM': PlainForCausalLM,
    "OuterForCausalLM": OuterForCausalLM,
    WIDE: WideForCausalLM,
    'GoneForCausalLM': Gone,
}
MODEL_MAP['LateForCausalLM'] = PlainForCausalLM
"""


@pytest.fixture
def make_tree(tmp_path):
    """A tree with the given pieces; None leaves a file out."""

    def make(root: Path = tmp_path, version='__version__ = "0.11.0"', spec="spec_decoding_params=None", models=MODELS):
        files = {
            "version.py": version,
            "layers/attention.py": None if spec is None else ATTENTION.format(spec=spec),
            "models/__init__.py": models,
            "models/plain/__init__.py": "",
            "models/plain/model.py": "from ..modeling_utils import Base\n\n\nclass PlainForCausalLM(Base):\n    pass\n",
            "models/renamed/__init__.py": "from .inner import Inner\n",
            "models/renamed/inner.py": "class Inner:\n    pass\n",
            "models/wide/__init__.py": "",
            "models/wide/config.py": "WIDE = 'WideForCausalLM'\n",
            "models/wide/model.py": "class WideForCausalLMBase:\n    pass\n\n\nclass WideForCausalLM:\n    pass\n",
        }
        for name, text in files.items():
            if text is not None:
                path = root / "tensorrt_llm" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        return root

    return make


def test_bundled_tree():
    tree = open_source_tree("bundled")
    assert (tree.root, tree.kind, tree.release) == (BUNDLED_ROOT, "bundled", "bundled-1")
    assert tree.spec_arguments == ("spec_decoding_params",)
    files = {name: model.file.parent.name for name, model in tree.model_classes().items()}
    assert files == {
        "BloomForCausalLM": "bloom",
        "GPTNeoXForCausalLM": "gptneox",
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "MedusaForCausalLM": "medusa",
        "Qwen2ForCausalLM": "qwen",
        "QWenForCausalLM": "qwen",
    }


def test_checkout_package_folder_and_site_packages_are_the_same_tree(make_tree, tmp_path):
    root = make_tree()
    for source in (root, str(root), root / "tensorrt_llm"):
        tree = open_source_tree(source)
        assert (tree.root, tree.kind, tree.release) == (root, "checkout", "0.11.0")
        assert tree.package == root / "tensorrt_llm"
    site = make_tree(tmp_path / "lib" / "site-packages")
    assert open_source_tree(site).kind == "installed"


def test_installed_package_is_found_without_importing_it(make_tree, tmp_path, monkeypatch):
    root = make_tree()
    (root / "tensorrt_llm" / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(root))
    tree = open_source_tree("installed")
    assert (tree.root, tree.kind) == (root, "installed")
    assert "tensorrt_llm" not in sys.modules


def test_nothing_installed_is_a_missing_environment(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMissing, match="bundled"):
        open_source_tree("installed")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("spec_decoding_params=None", ("spec_decoding_params",)),
        (
            "medusa_packed_mask=None, lora=None, medusa_position_offsets=None",
            ("medusa_packed_mask", "medusa_position_offsets"),
        ),
        (
            "spec_decoding_packed_mask=None, spec_decoding_position_offsets=None",
            ("spec_decoding_packed_mask", "spec_decoding_position_offsets"),
        ),
        ("*, spec_decoding_params=None", ("spec_decoding_params",)),
    ],
)
def test_the_era_is_read_from_the_attention_layer(make_tree, spec, expected):
    # The release says 0.11.0 in each case: it must not decide.
    assert open_source_tree(make_tree(spec=spec)).spec_arguments == expected


def test_models_are_followed_through_imports(make_tree):
    tree = open_source_tree(make_tree())
    folder = tree.package / "models"
    assert tree.find_model("OuterForCausalLM") == ModelClass(
        "OuterForCausalLM", "Inner", folder / "renamed" / "inner.py"
    )
    assert tree.find_model("WideForCausalLM").file == folder / "wide" / "model.py"
    assert tree.find_model("LateForCausalLM").class_name == "PlainForCausalLM"
    assert set(tree.model_classes()) == {"PlainForCausalLM", "OuterForCausalLM", "WideForCausalLM", "LateForCausalLM"}


def test_a_second_name_given_by_assignment_is_followed(make_tree):
    root = make_tree()
    file = root / "tensorrt_llm" / "models" / "plain" / "model.py"
    file.write_text(file.read_text() + "\n\nTwinForCausalLM = PlainForCausalLM\nLoop = Loop\n", encoding="utf-8")
    init = root / "tensorrt_llm" / "models" / "__init__.py"
    more = (
        "from .plain.model import Loop, TwinForCausalLM\nMODEL_MAP['Twin'] = TwinForCausalLM\nMODEL_MAP['L'] = Loop\n"
    )
    init.write_text(init.read_text() + more, encoding="utf-8")
    tree = open_source_tree(root)
    assert tree.find_model("Twin") == ModelClass("Twin", "PlainForCausalLM", file)
    with pytest.raises(SourceTreeError, match="'Loop'"):
        tree.find_model("L")


def test_a_misspelt_architecture_suggests_the_nearest(make_tree):
    tree = open_source_tree(make_tree())
    with pytest.raises(SourceTreeError) as caught:
        tree.find_model("PlainForCausalLm")
    assert "PlainForCausalLM" in caught.value.expected
    with pytest.raises(SourceTreeError, match="cannot be found"):
        tree.find_model("GoneForCausalLM")
    with pytest.raises(SourceTreeError) as caught:
        tree.find_model("zzz")
    assert "WideForCausalLM" in caught.value.message


@pytest.mark.parametrize(
    ("pieces", "subject"),
    [
        ({"version": None}, "release of the source tree cannot be read"),
        ({"version": "x = 1"}, "release of the source tree cannot be read"),
        ({"version": "__version__ = ("}, "cannot be read"),
        ({"spec": None}, "no speculative-decoding input"),
        ({"spec": "lora_layer_params=None"}, "no speculative-decoding input"),
    ],
)
def test_unusable_trees(make_tree, pieces, subject):
    root = make_tree(**pieces)
    with pytest.raises(SourceTreeError, match=subject) as caught:
        open_source_tree(root)
    assert str(root) in caught.value.where
    assert caught.value.next_step


def test_a_tree_without_models(make_tree):
    tree = open_source_tree(make_tree(models="MODELS = {}\n"))
    with pytest.raises(SourceTreeError, match="registers no models"):
        tree.model_classes()


@pytest.mark.parametrize("kind", ["nowhere", "empty folder", "file"])
def test_no_tree_there(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    with pytest.raises(SourceTreeError, match="no TensorRT-LLM source tree") as caught:
        open_source_tree(path)
    assert {"nowhere": "no such", "empty folder": "without it", "file": "a file"}[kind] in caught.value.found


def test_opening_a_tree_imports_nothing_heavy():
    code = (
        "import sys\nfrom porting_kit.source_tree import open_source_tree\n"
        "open_source_tree('bundled').find_model('BloomForCausalLM')\n"
        "print([name for name in ('torch', 'transformers', 'libcst', 'tensorrt_llm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.upstream
@pytest.mark.skipif(not os.environ.get("TRTLLM_SOURCE"), reason="TRTLLM_SOURCE names no TensorRT-LLM tree")
def test_upstream_trees():
    for source in os.environ["TRTLLM_SOURCE"].split(os.pathsep):
        tree = open_source_tree(source)
        assert tree.release[0].isdigit()
        assert tree.spec_arguments in (
            ("medusa_packed_mask", "medusa_position_offsets"),
            ("spec_decoding_packed_mask", "spec_decoding_position_offsets"),
            ("spec_decoding_params",),
        )
        models = tree.model_classes()
        assert models["BloomForCausalLM"].file == tree.package / "models" / "bloom" / "model.py"
        assert len(models) >= 15
        assert set(models) == set(tree._model_map())
