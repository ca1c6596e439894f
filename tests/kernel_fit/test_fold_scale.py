"""fold_scale on TensorRT-LLM's own classes that need it: Gemma 2's scalar, and jais's division by the head size."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch

from porting_kit.architectures.releases import release_key
from porting_kit.source_tree import open_source_tree
from tests.emulator.toy_models import ToySize, make_reference
from tests.kernel_fit.fitted_models import FittedModel, context_error, fit_toy, tree_error

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]
TOLERANCE = 4e-5
"""1e-5 of the toy models' logits, which are of order 4."""
GEMMA2_SINCE, GPT_SINCE = "0.13.0.dev2024090300", "0.9.0.dev2024031900"

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout"),
    pytest.mark.parametrize("source", SOURCES),
]


def require_errors_small(model: FittedModel) -> None:
    emulated = model.emulate()
    assert context_error(model, emulated, 100) < TOLERANCE
    assert tree_error(model, emulated) < TOLERANCE


def test_gemma_2_is_exact_with_its_scalar_folded(source):
    if release_key(open_source_tree(source).release) < release_key(GEMMA2_SINCE):
        pytest.skip("this tree has no Gemma 2 under its own name")
    # The class computes its scaling from query_pre_attn_scalar (24 here) and the head size (16).
    scaling = (24 / 16) ** 0.5
    model = fit_toy("gemma2", ToySize(heads=4), source=source, wanted=["fold_scale"], q_scaling=scaling)
    assert (model.fitted.config["q_scaling"], model.plan.exact) == (1.0, True)
    require_errors_small(model)
    unfolded = {**model.fitted.tensors, **{name: model.tensors[name] for name in model.tensors if "qkv" in name}}
    assert context_error(model, build_with(model, unfolded), 100) > 100 * TOLERANCE


def test_a_gpt_that_divides_by_the_head_size_is_exact_with_it_folded(source, monkeypatch):
    if release_key(open_source_tree(source).release) < release_key(GPT_SINCE):
        pytest.skip("this tree has no GPT class that reads a unified checkpoint")
    # jais is a GPT whose logits are q.k / D: Hugging Face's GPT-2 with its queries divided by sqrt(D) once more.
    D = 16
    original = make_reference("gpt2", ToySize(heads=4, kv_heads=4))
    scaled = copy.deepcopy(original)
    with torch.no_grad():
        for block in scaled.transformer.h:
            E = block.attn.c_attn.nf // 3
            block.attn.c_attn.weight[:, :E] /= D**0.5
            block.attn.c_attn.bias[:E] /= D**0.5
    from tests.kernel_fit import fitted_models

    convert = fitted_models.checkpoint_tensors

    def with_scaling(folder: Path, **options):
        config, tensors = convert(folder, **options)
        return {**config, "q_scaling": D**0.5}, tensors

    monkeypatch.setattr(fitted_models, "checkpoint_tensors", with_scaling)
    monkeypatch.setattr(fitted_models, "make_reference", lambda family, size: original)
    model = fit_toy("gpt2", ToySize(heads=4, kv_heads=4), source=source, wanted=["fold_scale"])
    model.reference = scaled
    assert model.config["q_scaling"] == D**0.5
    assert model.fitted.config["q_scaling"] == 1.0
    require_errors_small(model)
    model.reference = original
    assert context_error(model, model.emulate(), 100) > 100 * TOLERANCE


def build_with(model: FittedModel, tensors: dict[str, torch.Tensor]):
    """The fitted model with other tensors."""
    from dataclasses import replace

    return replace(model, fitted=replace(model.fitted, tensors=tensors)).emulate()
