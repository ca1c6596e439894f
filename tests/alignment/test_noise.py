"""The near-tie tolerance comes from the model at hand; false alarms and misses are measured."""

from dataclasses import replace

import pytest
import torch

from porting_kit.alignment.gates import judge_logits
from porting_kit.alignment.inherent import matched_to_library
from porting_kit.alignment.noise import SAFETY, compare_logits, measure_noise, relative_error
from porting_kit.alignment.oracle import Status, judge_texts
from porting_kit.alignment.reference import load_reference
from porting_kit.errors import BaseModelError
from porting_kit.medusa.decoding import generate_greedy
from tests.alignment.tiny_ports import make_base, make_port, make_prompts

BASES = [("llama", 0), ("llama", 1), ("bloom", 0), ("gptneox", 0)]


@pytest.fixture(scope="module", params=BASES, ids=lambda base: f"{base[0]}-{base[1]}")
def reference(request, tmp_path_factory):
    family, seed = request.param
    return load_reference(make_base(tmp_path_factory.mktemp(family), family, seed=seed))


@pytest.fixture(scope="module")
def texts(reference):
    prompts = make_prompts()
    return [[*prompt, *row] for prompt, row in zip(prompts, reference.generate(prompts, 40), strict=True)]


def test_noise_grows_with_the_rounding_of_the_dtype(reference, texts):
    noise = {dtype: measure_noise(reference, texts, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    tolerances = [noise[dtype].near_tie_tolerance for dtype in noise]
    assert tolerances == sorted(tolerances)
    assert 0 < tolerances[0] < 1e-3 < tolerances[2]
    assert noise[torch.float16].positions == sum(map(len, texts))
    assert noise[torch.float32].resolved > 0.99, "wrong tokens can be told at nearly every position"


SLOW = pytest.mark.slow
ALARM_CASES = [
    ("llama", "float16", 1),
    ("bloom", "bfloat16", 1),
    *(
        pytest.param(family, dtype, 5, marks=SLOW)
        for family in ("llama", "bloom", "gptneox", "qwen2")
        for dtype in ("float16", "bfloat16")
    ),
]


@pytest.mark.parametrize(("family", "dtype", "seeds"), ALARM_CASES)
def test_rounding_alone_raises_no_alarm(family, dtype, seeds, tmp_path):
    """False alarms: half-precision ports, judged in float32. No token may be called wrong."""
    wrong = near_ties = total = 0
    for seed in range(seeds):
        port = make_port(tmp_path / str(seed), family, dtype=dtype, seed=seed)
        emitted = generate_greedy(port.state.build(), port.prompts, 40, [2]).tokens
        texts = [[*prompt, *row] for prompt, row in zip(port.prompts, emitted, strict=True)]
        with matched_to_library(port.reference, port.differences[:1]):
            noise = measure_noise(port.reference, texts, getattr(torch, dtype))
            judged = judge_texts(port.reference, port.prompts, emitted, noise.near_tie_tolerance, end_ids=(2,))
        wrong += sum(len(text.positions(Status.WRONG)) for text in judged)
        near_ties += sum(len(text.positions(Status.NEAR_TIE)) for text in judged)
        total += sum(map(len, emitted))
    assert wrong == 0, f"{wrong} false alarms and {near_ties} near-ties in {total} tokens"
    assert near_ties < 0.1 * total


def test_a_real_fault_is_no_noise(reference, texts):
    """Misses: the base with one projection left out must emit wrong tokens beyond the half-precision tolerance."""
    prompts = make_prompts()
    tolerance = measure_noise(reference, texts, torch.float16).near_tie_tolerance
    name = next(name for name, _ in reference.model.named_parameters() if "dense.weight" in name or "o_proj" in name)
    parameter = reference.model.get_parameter(name)
    kept = parameter.data
    parameter.data = torch.zeros_like(kept)
    try:
        emitted = reference.generate(prompts, 40)
    finally:
        parameter.data = kept
    judged = judge_texts(reference, prompts, emitted, tolerance, end_ids=reference.settings.end_ids)
    assert sum(len(text.positions(Status.WRONG)) for text in judged) > 3


def test_figures_by_hand():
    oracle = torch.tensor([[4.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    changed = torch.tensor([[4.1, 2.0, 0.0], [1.0, 2.5, 0.0]])
    noise = compare_logits([oracle], [changed], "float16")
    assert noise.logit_error == pytest.approx(0.5)
    assert noise.relative_error == pytest.approx(0.5 / 3)
    assert noise.gap_error == pytest.approx(0.5)
    assert noise.near_tie_tolerance == pytest.approx(SAFETY * 0.5)
    assert (noise.flips, noise.positions, noise.resolved) == (0, 2, 1.0)
    assert compare_logits([oracle], [changed], "float16", tolerance=5.0).resolved == 0.0
    assert relative_error(changed, oracle) == pytest.approx(0.5 / 3)


def test_broken_logits_are_refused():
    broken = torch.tensor([[1.0, torch.inf]])
    with pytest.raises(BaseModelError, match="non-finite logits"):
        compare_logits([broken], [broken], "float16")


@pytest.mark.parametrize(("dtype", "chooses", "error", "said"), [
    ("float16", True, 0.5, True),
    ("float16", False, 0.5, False),
    ("float16", True, 0.0, False),
    ("float32", True, 0.5, False),
])  # fmt: skip
def test_a_failure_that_routing_may_explain_says_how_to_tell(dtype, chooses, error, said):
    noise = compare_logits([torch.randn(4, 9)], [torch.randn(4, 9) * 0.01], dtype)
    noise = replace(noise, relative_error=1e-3)
    gate = judge_logits(noise, error, error, chooses_experts=chooses)
    assert gate.passed == (error == 0)
    assert ("routed otherwise" in gate.detail) == said
