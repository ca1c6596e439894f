"""Every family against Hugging Face: a tiny model converted, run by TensorRT-LLM's own Python, compared.

The bundled definitions carry four families; the others need a TensorRT-LLM checkout named by TRTLLM_SOURCE (one folder
or several, separated by colons). Tolerance: 1e-5 of the largest logit in float32; measured 2e-7 to 7e-7.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from porting_kit.architectures import load_families, read_base_config
from porting_kit.architectures.release_needs import find_unmet_needs
from porting_kit.architectures.releases import release_key
from porting_kit.conversion import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.patching import build_medusa_module
from porting_kit.source_tree import open_source_tree
from tests.conversion.rule_models import head_tensors
from tests.conversion.tiny_families import CASES, E, EditedClass, V, reference_logits, save_tiny

TOLERANCE = 1e-5
BUNDLED = (
    "bloom",
    "gptneox",
    "llama",
    "llama-biases-tied",
    "llama-wide-heads",
    "llama-linear-rope",
    "mistral",
    "qwen2",
)
SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """Each case saved once: name -> (folder, reference)."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def get(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "base"
            made[name] = folder, save_tiny(CASES[name], folder)
        return made[name]

    return get


def largest_error(tree, folder: Path, reference: torch.nn.Module, change=None, edited: EditedClass | None = None):
    """Largest difference over the largest logit, two prompts of unequal length, all positions."""
    options, release = {}, tree.release
    if edited is not None:
        options, release = edit_class(tree, edited), None
    config, tensors = checkpoint_tensors(folder, dtype="float32", release=release)
    if change is not None:
        change(config, tensors)
    if edited is not None:
        config["architecture"] = edited.architecture
    model = open_emulator(tree).build_model(config, tensors, **options)
    prompts = [torch.arange(3, 14) * 7 % V, torch.arange(5) * 11 % V]
    logits = model.prefill(prompts, model.new_cache(2, 32), all_logits=True).logits
    wanted = [reference_logits(reference, prompt) for prompt in prompts]
    return max(
        float((got[:, :V] - want).abs().max() / want.abs().max()) for got, want in zip(logits, wanted, strict=True)
    )


def edit_class(tree, edited: EditedClass) -> dict[str, str]:
    """The source of a later class, made from this tree's own, and its name."""
    file = tree.find_model(edited.architecture).file
    source = file.read_text()
    for text, replacement in edited.edits:
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    package = f"tensorrt_llm.models.{file.parent.name}"
    for dots, parent in (("...", "tensorrt_llm."), ("..", "tensorrt_llm.models."), (".", f"{package}.")):
        source = source.replace(f"\nfrom {dots}", f"\nfrom {parent}")
    if "LayerNormType" not in source.split("class ")[0]:
        source = source.replace("\nimport math", "\nimport math\nfrom tensorrt_llm.functional import LayerNormType", 1)
    return {"module_source": source, "class_name": edited.class_name}


def test_every_family_has_a_tiny_model() -> None:
    """A family without one would be tested by nothing."""
    assert set(load_families()) == {case.family for case in CASES.values()}


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_definitions_agree_with_hugging_face(name: str, tiny) -> None:
    folder, reference = tiny(name)
    assert largest_error(open_source_tree("bundled"), folder, reference) <= TOLERANCE


@pytest.mark.parametrize("name", ["bloom", "gptneox", "llama", "qwen2"])
def test_heads_give_their_logits_in_the_graph(name: str, tiny, tmp_path: Path) -> None:
    """Three heads of two residual layers on the patched definitions: x + silu(W x + b), twice, then the matrix."""
    folder, reference = tiny(name)
    tree, tensors = open_source_tree("bundled"), head_tensors(3, 2, hidden=E, vocab=V)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    config, weights = checkpoint_tensors(folder, tmp_path, "float32")
    module = build_medusa_module(tree, config["architecture"])
    model = open_emulator(tree).build_model(config, weights, module_source=module.source, class_name=module.class_name)
    prompt = torch.arange(3, 14) * 7 % V
    found = model.prefill([prompt], model.new_cache(1, 32)).medusa_logits
    with torch.no_grad():
        hidden = reference(prompt[None], output_hidden_states=True).hidden_states[-1][0, -1]
    for head in range(3):
        x = hidden
        for layer in range(2):
            inner = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + torch.nn.functional.silu(inner)
        wanted = tensors[f"{head}.2.weight"] @ x
        assert float((found[head, 0, :V] - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE


@pytest.mark.parametrize(("name", "swap"), [("bloom", "heads"), ("llama", "gate and up"), ("llama", "base")])
def test_a_seeded_fault_is_seen(name: str, swap: str, tiny) -> None:
    """The comparison must be able to fail: three faults a porter makes."""
    folder, reference = tiny(name)

    def spoil(config: dict, tensors: dict) -> None:
        if swap == "heads":
            for key in [key for key in tensors if "attention.qkv" in key]:
                tensors[key] = tensors[key].reshape(4, 3, -1).transpose(0, 1).reshape(tensors[key].shape).contiguous()
        elif swap == "gate and up":
            gate, up = "transformer.layers.1.mlp.fc.weight", "transformer.layers.1.mlp.gate.weight"
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
        else:
            config["rotary_base"] = 10000.0

    assert largest_error(open_source_tree("bundled"), folder, reference, spoil) > 100 * TOLERANCE


@pytest.mark.upstream
@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", SOURCES)
def test_upstream_definitions_agree_with_hugging_face(source: str, name: str, tiny) -> None:
    tree, case = open_source_tree(source), CASES[name]
    folder, reference = tiny(name)
    if case.edited is not None:
        if tree.release != case.edited.release:
            pytest.skip(f"{name} is checked on the class of {case.edited.release}, edited")
        assert largest_error(tree, folder, reference, edited=case.edited) <= TOLERANCE
        return
    base = read_base_config(folder)
    if unmet := find_unmet_needs(base, tree.release):
        pytest.skip(f"TensorRT-LLM {tree.release} lacks {unmet[0].what} (since {unmet[0].since})")
    if case.since and release_key(tree.release) < release_key(case.since):
        pytest.skip(f"TensorRT-LLM {tree.release} differs by design before {case.since}")
    assert largest_error(tree, folder, reference) <= TOLERANCE
