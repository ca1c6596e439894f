"""Every model definition of the TensorRT-LLM trees in TRTLLM_SOURCE: status, clean after the patch, diff applies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from porting_kit.errors import PatchError
from porting_kit.patching import (
    build_medusa_module,
    find_dropped_arguments,
    patch_architecture,
    patch_model_source,
    write_patch,
)
from porting_kit.patching.medusa_module import read_source
from porting_kit.source_tree import SourceTree, open_source_tree
from tests.patching.test_medusa_module import git_apply, snapshot

SOURCES = [Path(each) for each in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if each]
FILES = [file for source in SOURCES for file in sorted(source.glob("tensorrt_llm/models/*/model.py"))]
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not FILES, reason="TRTLLM_SOURCE names no TensorRT-LLM tree"),
]

# What passes the arguments all the way in some release (read from the trees from 0.8.0.dev2024013000 to
# 0.16.0.dev2024121000), and what no patch of this kind can help, with a word of the reason.
ACCEPTED_SOMEWHERE = {"llama", "gpt", "grok", "deci", "nemotron_nas", "deepseek_v1", "commandr", "qwen"}
ALWAYS_PATCHED = {"bloom", "baichuan", "dbrx", "falcon", "gptj", "gptneox", "mpt", "opt", "phi", "phi3", "gemma"}
REFUSED = {
    "mamba": "recurrent state",
    "recurrentgemma": "recurrent state",
    "enc_dec": "cross attention",
    "bert": "BertAttention",
    "dit": "BertAttention",
    "cogvlm": "CogVLMAttention",
    "medusa": "no decoder layer",
    "redrafter": "no decoder layer",
    "eagle": "no decoder layer",
    "mllama": "cross attention",
    "deepseek_v2": "DeepseekV2Attention",
}


@pytest.mark.parametrize("file", FILES or [None], ids=lambda file: "-".join(file.parts[-5::3]) if file else "none")
def test_every_model_definition(file):
    tree = open_source_tree(file.parents[3])
    source = read_source(file)
    started = time.process_time()
    outcome = patch_model_source(source, spec_arguments=tree.spec_arguments, file=str(file))
    seconds = time.process_time() - started
    name = file.parent.name

    if name in REFUSED:
        assert outcome.status == "refused"
        assert REFUSED[name] in outcome.reason
        return
    if outcome.status == "refused":
        assert outcome.reason
        if name not in ACCEPTED_SOMEWHERE | ALWAYS_PATCHED:
            return
        # Up to 0.9 some top classes made their inputs themselves.
        assert tree.release < "0.9.0.dev20240305"
        assert "is not built on DecoderModelForCausalLM" in outcome.reason
        return
    assert seconds < 1.0, f"{seconds:.2f} s"
    assert outcome.status == "patched" or name in ACCEPTED_SOMEWHERE
    assert outcome.status == "patched" or name not in ALWAYS_PATCHED
    assert find_dropped_arguments(outcome.source, tree.spec_arguments) == ()
    compile(outcome.source, str(file), "exec")
    if outcome.status == "patched":
        only_positions = {edit.site for edit in outcome.edits} == {"new function", "self.position_embedding"}
        assert bool(find_dropped_arguments(source, tree.spec_arguments)) != only_positions
        again = patch_model_source(outcome.source, spec_arguments=tree.spec_arguments, file=str(file))
        assert (again.status, again.source) == ("already_accepts", outcome.source)


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda source: source.name if source else "none")
def test_diffs_apply_and_reverse(source, tmp_path):
    tree = open_source_tree(source)
    copy = tmp_path / "tree"
    shutil.copytree(tree.package / "models", copy / "tensorrt_llm" / "models", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(tree.package / "layers", copy / "tensorrt_llm" / "layers", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(tree.package / "version.py", copy / "tensorrt_llm")
    before = snapshot(open_source_tree(copy))
    tried = _try_every_architecture(tree, copy, tmp_path)
    assert tried >= 5
    assert snapshot(open_source_tree(copy)) == before


def _try_every_architecture(tree: SourceTree, copy: Path, tmp_path: Path) -> int:
    files = set()
    for architecture, model in tree.model_classes().items():
        if model.file in files or model.file.parent.name in REFUSED:
            continue
        files.add(model.file)
        if patch_architecture(tree, architecture).status == "refused":
            with pytest.raises(PatchError, match="is not built on DecoderModelForCausalLM"):
                build_medusa_module(tree, architecture)
            continue
        module = build_medusa_module(tree, architecture)
        compile(module.source, module.file_name, "exec")
        _, patch = write_patch(module, tmp_path / architecture)
        git_apply(copy, patch)
        patched = open_source_tree(copy)
        assert read_source(patched.find_model(architecture).file) == module.outcome.source
        assert patched.find_model(module.class_name).class_name == module.class_name
        git_apply(copy, patch, "--reverse")
    return len(files)
