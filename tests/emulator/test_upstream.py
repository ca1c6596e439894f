"""Real TensorRT-LLM model definitions, every family, against Hugging Face.

TRTLLM_SOURCE names one or more trees (separated by colons); each family runs where the tree has its architecture.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from porting_kit.emulator import Emulator, open_emulator
from porting_kit.errors import BaseModelError, EmulatorError, SourceTreeError
from porting_kit.source_tree import SourceTree, open_source_tree
from tests.emulator.differential import compare_model, relative
from tests.emulator.patched import patch_model
from tests.emulator.test_kernel import lenient_profile, run_steps
from tests.emulator.toy_models import MAKERS, VOCAB, build_case

pytestmark = pytest.mark.upstream

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]
# float32 rounding of two ways to add up the same products.
BOUND = 1e-5


@pytest.fixture(scope="module", params=SOURCES or [None], ids=lambda source: Path(source or "unset").name)
def upstream(request: pytest.FixtureRequest) -> tuple[SourceTree, Emulator]:
    if request.param is None:
        pytest.skip("TRTLLM_SOURCE is unset: it names a folder that holds tensorrt_llm/, or several")
    tree = open_source_tree(request.param)
    return tree, open_emulator(tree)


def equalise_reference(reference: Any, family: str, release: str) -> None:
    """Give the reference a defect that the release has, so that everything else can be compared to rounding."""
    if family == "phi3-long" and release.startswith("0.11"):
        # phi3/model.py l.73 of 0.11.0.dev2024062500 passes 1.0 for long rope's attention factor.
        reference.model.rotary_emb.attention_scaling = 1.0


@pytest.mark.parametrize("family", MAKERS)
def test_family_matches_transformers(
    upstream: tuple[SourceTree, Emulator], family: str, record_property: pytest.RecordProperty
) -> None:
    tree, emulator = upstream
    try:
        reference, config, tensors = build_case(family, release=tree.release)
        arguments = patch_model(tree, config["architecture"])
    except (BaseModelError, SourceTreeError) as error:
        pytest.skip(f"{tree.release}: {error.subject}")
    equalise_reference(reference, family, tree.release)
    model = emulator.build_model(config, tensors, **arguments)
    differences = compare_model(model, reference, VOCAB)
    record_property("difference", differences.worst())
    assert differences.worst() < BOUND, differences


def test_unpatched_model_raises_the_library_error(upstream: tuple[SourceTree, Emulator]) -> None:
    tree, emulator = upstream
    _, config, tensors = build_case("bloom", release=tree.release)
    model = emulator.build_model(config, tensors)
    cache = model.new_cache(1, 16)
    model.prefill([torch.arange(4)], cache)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model.decode(
            torch.zeros(1, 2, dtype=torch.int64),
            cache,
            position_offsets=torch.tensor([0, 1]),
            packed_mask=torch.tensor([[1], [3]], dtype=torch.int32),
        )


# family -> folder under models/ whose convert.py takes a Hugging Face model
CONVERTERS = {
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "falcon-rw": "falcon",
    "gptj": "gptj",
    "phi": "phi",
    "phi3": "phi3",
    "llama": "llama",
    "qwen2": "qwen",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt",
    "starcoder2": "gpt",
}


@pytest.mark.parametrize("family", CONVERTERS)
def test_own_converter_gives_the_same_bits(upstream: tuple[SourceTree, Emulator], family: str) -> None:
    """Upstream's own weight converter, run in the namespace, gives exactly the tensors that our rules give."""
    tree, emulator = upstream
    name = f"tensorrt_llm.models.{CONVERTERS[family]}.convert"
    if not tree.root.joinpath(*name.split(".")).with_suffix(".py").is_file():
        pytest.skip(f"{tree.release} has no {name}")
    convert = getattr(emulator.namespace.import_module(name), "load_weights_from_hf_model", None)
    if convert is None:
        pytest.skip(f"{name} of {tree.release} does not take a Hugging Face model")
    reference, config, tensors = build_case(family, release=tree.release)
    utils = emulator.namespace.import_module("tensorrt_llm.models.modeling_utils")
    with emulator.namespace.activate():
        theirs = convert(reference, utils.PretrainedConfig.from_dict(copy.deepcopy(config)))
    assert set(theirs) == set(tensors)
    different = [name for name in theirs if not torch.equal(theirs[name], tensors[name])]
    assert not different


def test_one_position_id_per_request(upstream: tuple[SourceTree, Emulator]) -> None:
    """Learned positions with only the tree passed on: wrong at batch 1, a shape error at batch 2; patched: right."""
    tree, emulator = upstream
    _, config, tensors = build_case("opt", release=tree.release)
    patched = patch_model(tree, config["architecture"])
    call = r"(?<!def )spread_position_ids\(\s*position_ids,[^()]*\)"
    source, count = re.subn(call, "position_ids", patched["module_source"])
    if count == 0:
        pytest.skip(f"{tree.release}: the patch does not compute positions in this tree's OPT")
    only_passed = {**patched, "module_source": source}
    release = open_emulator(tree, kernel=lenient_profile())
    right = run_steps(emulator.build_model(config, tensors, **only_passed))
    wrong = run_steps(release.build_model(config, tensors, **only_passed))
    assert torch.equal(right[1], wrong[1])
    assert relative(wrong[2], right[2]) > 1e-2
    with pytest.raises(EmulatorError, match="do not fit together"):
        run_steps(release.build_model(config, tensors, **only_passed), batch=2)
    for batch in (1, 2):
        expected = run_steps(emulator.build_model(config, tensors, **patched), batch)
        found = run_steps(release.build_model(config, tensors, **patched), batch)
        for first, second in zip(found, expected, strict=True):
            assert relative(first, second) < 1e-6
