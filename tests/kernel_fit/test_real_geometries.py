"""Head counts and sizes of real models on random ones, fitted or not, against Hugging Face: logits and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from porting_kit.alignment.reference import Reference, load_reference
from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.kernel_fit.fit import apply_fit
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.patching.medusa_module import build_medusa_module
from porting_kit.releases.kernels import kernel_profile
from porting_kit.source_tree import open_source_tree
from tests.alignment.tiny_ports import make_base, make_prompts
from tests.benchmarks.xqa import GEOMETRIES
from tests.kernel_fit.fitted_models import MASK, OFFSETS, PATHS, float32_profile, shape_of

BOUND = 1e-5
OLD, BUG_REPORT = "0.9.0.dev2024022700", "0.11.0.dev2024062500"
CASES = {
    # Qwen2-7B: 28 / 4 heads of 128, base 1,000,000, biases.
    "qwen2, groups refused": ("qwen2", OLD, ("pad_query_groups",)),
    "qwen2, groups taken": ("qwen2", BUG_REPORT, ()),
    # SmolLM2: 9 / 3 heads of 64.
    "smollm2, groups refused": ("llama", OLD, ("pad_head_size", "pad_query_groups")),
    "smollm2, groups taken": ("llama", BUG_REPORT, ("pad_head_size",)),
}


@dataclass
class Port:
    """A base and its fitted checkpoint on the kernels of a release, in float32."""

    reference: Reference
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    release: str
    transforms: tuple[str, ...]
    patched: dict[str, Any]

    def build(self) -> Any:
        """The model in the emulator."""
        emulator = open_emulator(open_source_tree("bundled"), kernel=float32_profile(f"release:{self.release}"))
        return emulator.build_model(self.config, self.tensors, **self.patched)


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def port(request, tmp_path_factory):
    family, release, transforms = CASES[request.param]
    folder = make_base(tmp_path_factory.mktemp(family) / "base", family, **GEOMETRIES[family])
    config, tensors = checkpoint_tensors(folder, dtype="float32")
    tree = open_source_tree("bundled")
    plan = plan_fit(shape_of(config, max_seq_len=256), kernel_profile(f"release:{release}"), config=config)
    assert plan.names == transforms
    fitted = apply_fit(plan, config, tensors)
    module = build_medusa_module(tree, config["architecture"], fit=plan)
    patched = {"module_source": module.source, "class_name": module.base_class_name}
    if not plan.steps and module.outcome.status == "already_accepts":
        patched = {}
    return Port(load_reference(folder), fitted.config, dict(fitted.tensors), release, transforms, patched)


@torch.no_grad()
def relative_errors(port: Port) -> tuple[float, float]:
    """Largest logit error of the context and of a tree's nodes, over the largest logit."""
    model, prompt = port.build(), make_prompts((70,))[0]
    nodes = torch.tensor(make_prompts((len(PATHS),), seed=8)[0])
    cache = model.new_cache(1, len(prompt) + len(PATHS))
    found = model.prefill([torch.tensor(prompt)], cache, all_logits=True).logits[0]
    tree = model.decode(nodes[None], cache, position_offsets=OFFSETS, packed_mask=MASK).logits[0]
    texts = [[*prompt, *nodes[list(path)].tolist()] for path in PATHS]
    expected = port.reference.logits([prompt, *texts])
    scale = float(expected[0].abs().max())
    V = expected[0].shape[1]
    context = float((found[:, :V] - expected[0]).abs().max()) / scale
    branches = [float((row[:V] - rows[-1]).abs().max()) / scale for row, rows in zip(tree, expected[1:], strict=True)]
    return context, max(branches)


def test_logits_and_tokens_are_hugging_faces(port: Port):
    assert max(relative_errors(port)) < BOUND
    prompts = make_prompts((5, 33))
    theirs = port.reference.generate(prompts, 24)
    ours = generate_greedy(port.build(), prompts, 24, port.reference.settings.end_ids).tokens
    assert [list(map(int, row)) for row in ours] == [list(map(int, row)) for row in theirs]


def drop_biases(port: Port) -> None:
    for name in port.tensors:
        if name.endswith("qkv.bias"):
            port.tensors[name] = torch.zeros_like(port.tensors[name])


def lose_the_base(port: Port) -> None:
    port.config["rotary_base"] = 10000.0


@pytest.mark.parametrize("fault", [drop_biases, lose_the_base])
def test_what_went_wrong_there_would_be_seen(port: Port, fault):
    if fault is drop_biases and not any(name.endswith("qkv.bias") for name in port.tensors):
        pytest.skip("this family has no biases")
    kept = dict(port.tensors), dict(port.config)
    try:
        fault(port)
        assert max(relative_errors(port)) > 100 * BOUND
    finally:
        port.tensors, port.config = kept
