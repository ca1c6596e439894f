"""The stand-in's recorded signatures are those of the releases' own sources, and every release takes what we pass."""

import ast
import json
from functools import lru_cache
from pathlib import Path

import pytest
from upstream_parser import upstream_trees

from porting_kit.engine import capture_runtimes

RECORDED = json.loads((Path(__file__).parent / "stand_in" / "recorded.json").read_text())
FUNCTIONS = {
    "ModelRunner": ("runtime/model_runner.py", ("from_dir", "generate")),
    "ModelRunnerCpp": ("runtime/model_runner_cpp.py", ("from_dir", "generate")),
    "LLM": ("llmapi/llm.py", ("__init__", "generate", "generate_async")),
}
FIELDS = {
    "SamplingConfig": "runtime/generation.py",
    "MedusaDecodingConfig": "llmapi/llm_utils.py",
    "SamplingParams": "sampling_params.py",
}

# Releases without a tree, and where their signatures were read, once: no test can read them again. The documentation
# of a release (gh-pages branch of NVIDIA/TensorRT-LLM) holds the sources of the modules it documents, in _modules/.
READ_ONCE = {
    "0.20.0": "a fork of 0.20.0 that merged 1.1.0rc6",
    "1.0.0": "the documentation of 1.0.0 (090dc64986ba), made from ae8270b",
    "1.1.0rc6": "a fork of 0.20.0 that merged 1.1.0rc6",
    "1.2.0": "the documentation of 1.2.0 (7e873e54c296), made from dbdb13b",
}

# The script looks for these two itself: they are there from 0.20 on.
GATHER, ASK = "gather_generation_logits", "output_generation_logits"


@lru_cache(maxsize=16)
def read_api(package):
    """Entry -> names of its parameters or fields, in order; `**` for any others."""
    found = {}
    for name, (file, functions) in FUNCTIONS.items():
        body = class_body(package / file, name)
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                found[f"{name}.{node.name}"] = parameter_names(node.args)
    for name, file in FIELDS.items():
        fields = [node.target.id for node in class_body(package / file, name) if isinstance(node, ast.AnnAssign)]
        if fields:
            found[name] = fields
    return found


def class_body(file, name):
    if not file.is_file():
        return []
    module = ast.parse(file.read_text(encoding="utf-8"))
    return next((node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), [])


def parameter_names(arguments):
    names = [item.arg for item in [*arguments.args, *arguments.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")] + (["**"] if arguments.kwarg else [])


def passed_keywords(function):
    """Keywords of the `generate` call in the capture script, and keys of the options given to `from_dir`."""
    source = Path(capture_runtimes.__file__).read_text(encoding="utf-8")
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    names = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "generate":
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return names - {"tokens", "accepted", "lengths", "steps"}


def test_the_calls_of_the_script_are_found():
    assert {"max_new_tokens", "end_id", "top_k", "streaming", "return_dict"} <= passed_keywords("open_runner")
    assert {"engine_dir", "rank", "max_batch_size", "max_input_len"} <= passed_keywords("open_runner_cpp")


@pytest.mark.parametrize("release", READ_ONCE)
def test_releases_without_a_tree_take_what_the_script_gives(release):
    recorded = {entry: set(names.split()) for entry, names in RECORDED[release].items()}
    assert passed_keywords("open_runner_cpp") | {"medusa_choices", GATHER} <= recorded["ModelRunnerCpp.from_dir"]
    taken = recorded["ModelRunnerCpp.generate"] | recorded["ModelRunnerCpp.sampling"]
    assert passed_keywords("open_runner") - {"sampling_config"} <= taken
    assert ASK in recorded["ModelRunnerCpp.generate"] & recorded["ModelRunner.generate"]
    assert passed_keywords("open_runner_python") | {"medusa_choices"} <= recorded["ModelRunner.from_dir"]
    assert {"max_draft_len", "medusa_choices", "num_medusa_heads"} <= recorded["MedusaDecodingConfig"]
    assert {"max_tokens", "end_id", "pad_id", "top_k", "return_generation_logits"} <= recorded["SamplingParams"]
    assert {"model", "skip_tokenizer_init", "**"} <= recorded["LLM.__init__"]
    assert {"inputs", "sampling_params"} <= recorded["LLM.generate"]
    assert {"inputs", "sampling_params", "streaming"} <= recorded["LLM.generate_async"]


upstream = pytest.mark.upstream
needs_trees = pytest.mark.skipif(not upstream_trees(), reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")


@upstream
@needs_trees
@pytest.mark.parametrize("tree", upstream_trees(), ids=lambda tree: tree.release)
class TestUpstreamSources:
    def test_what_is_recorded_is_what_the_source_says(self, tree):
        if tree.release not in RECORDED:
            pytest.skip("this release is not recorded")
        found = read_api(tree.package)
        for entry, names in RECORDED[tree.release].items():
            assert found[entry] == names.split(), entry

    def test_the_release_takes_every_argument_of_the_script(self, tree):
        """By name, or as a setting of SamplingConfig: an unknown one would be dropped without a word."""
        api = read_api(tree.package)
        runs_in_cpp = "medusa_choices" in api["ModelRunnerCpp.from_dir"]
        runner, opener = ("ModelRunnerCpp", "open_runner_cpp") if runs_in_cpp else ("ModelRunner", "open_runner_python")
        offered = set(api[f"{runner}.from_dir"])
        optional = set() if runs_in_cpp else {"max_output_len"}  # the script looks for that one itself
        assert passed_keywords(opener) | {"medusa_choices"} <= offered | optional
        call = passed_keywords("open_runner") - {"sampling_config", ASK}
        assert call <= set(api[f"{runner}.generate"]) | set(api["SamplingConfig"]), runner

    def test_medusa_config_and_sampling_take_what_the_script_gives(self, tree):
        api = read_api(tree.package)
        if "MedusaDecodingConfig" not in api:
            pytest.skip("this release's LLM takes no tree")
        assert {"medusa_choices", "num_medusa_heads"} <= set(api["MedusaDecodingConfig"])
        assert {"max_tokens", "end_id", "pad_id", "top_k", "return_generation_logits"} <= set(api["SamplingParams"])
        assert {"model", "skip_tokenizer_init", "**"} <= set(api["LLM.__init__"])
