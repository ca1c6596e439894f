"""Every family that transformers has itself, base to verdict through the command line, on real TensorRT-LLM trees."""

from __future__ import annotations

import os

import pytest
import yaml
from safetensors.torch import save_file

from porting_kit.architectures.base_config import read_base_config
from porting_kit.coverage.cases import CASES
from porting_kit.coverage.matrix import RowRefused, is_before, require_expressible
from porting_kit.coverage.planned import find_architecture
from porting_kit.coverage.reference_models import make_reference, save_reference
from porting_kit.patching import patch_architecture
from porting_kit.source_tree import open_source_tree
from tests.cli.conftest import make_heads
from tests.cli.test_commands import call

TREES = [path for path in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if path]
NATIVE = [case for case in CASES if case.rename is None and case.make_model is None]

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(not TREES, reason="TRTLLM_SOURCE names no TensorRT-LLM tree"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("source", TREES)
@pytest.mark.parametrize("case", NATIVE, ids=lambda case: case.name)
def test_a_familys_port_passes(case, source, dtype, tmp_path):
    tree = open_source_tree(source)
    arch = find_architecture(case, tree.release)
    if arch not in tree.model_names() or patch_architecture(tree, arch).status == "refused":
        pytest.skip(f"{tree.release} has no {arch}, or none that can be patched")
    model = make_reference(case)
    save_reference(case, model, tmp_path / "base")
    try:
        require_expressible(read_base_config(tmp_path / "base"), tree.release)
    except RowRefused as refusal:
        pytest.skip(str(refusal))
    if case.defect is not None and is_before(tree.release, case.defect.until):
        pytest.skip(case.defect.what)
    (tmp_path / "heads").mkdir()
    hidden = model.config.get_text_config().hidden_size
    save_file(make_heads(hidden, 3), tmp_path / "heads" / "medusa_lm_head.safetensors")
    new_tokens = 5 if "long rope" in case.name else 12  # below the length at which its factors change
    port = {
        "name": "tiny", "base": "base", "heads": "heads", "dtype": dtype, "trtllm": {"source": source},
        "tree": "cartesian:3,2,2", "alignment": {"new_tokens": new_tokens, "batch_sizes": [3]},
    }  # fmt: skip
    (tmp_path / "port.yaml").write_text(yaml.safe_dump(port))
    code, document, stderr = call("align", tmp_path / "port.yaml", "--out", tmp_path / "run")
    failing = [gate["detail"] for gate in document.get("gates", []) if gate["passed"] is False]
    if failing and dtype == "float16" and all("routed otherwise" in detail for detail in failing):
        assert document["tokens_equal"], stderr  # a small random router has near-ties; the layers part there too
        return
    assert code == 0, f"{document.get('summary') or document}\n{stderr}"
    assert document["verdict"] == "pass"
    assert document["layers"]["first"] is None, document["layers"]["sentence"]
