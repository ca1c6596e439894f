"""write_positions against Hugging Face: exact in context and tree, in every release's source, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from porting_kit.errors import BaseModelError, ConversionError, PatchError, PortFileError
from porting_kit.kernel_fit.alibi import ERROR_BOUND_NATS, wave_biases
from porting_kit.kernel_fit.alibi_line import alibi_slopes, fit_alibi, frequencies
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.kernel_fit.position_source import write_position_source
from porting_kit.kernel_fit.settings import DIGIT_BASE, LARGEST_DIGIT
from porting_kit.kernel_fit.targets import TargetFit
from porting_kit.kernel_fit.written_positions import measure_slopes, slope_parts, write_positions
from porting_kit.releases.kernels import kernel_profile
from porting_kit.releases.shape import AttentionShape
from tests.benchmarks.alibi_fit import measure_attention
from tests.emulator.toy_models import ToySize
from tests.kernel_fit.attention_change import rotate_front
from tests.kernel_fit.fitted_models import RELEASE, context_error, fit_toy, tree_error

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]
SIZE_64 = ToySize(hidden_size=256, heads=4, kv_heads=4)
TOLERANCE = 4e-5
"""1e-5 of the toy models' logits, which are of order 4."""
BLOOM_7B1 = AttentionShape(128, 32, 32, "bfloat16", position_kind="alibi", max_seq_len=2048)


@pytest.fixture(scope="module")
def bloom():
    return fit_toy("bloom", SIZE_64, engine_dtype="bfloat16")


def test_fitted_bloom_is_exact_where_the_release_drops_alibi(bloom):
    assert (bloom.plan.names, bloom.plan.exact, bloom.fitted.notes[0].exact) == (("write_positions",), True, True)
    assert bloom.fitted.config["position_embedding_type"] == "learned_absolute"
    emulated = bloom.emulate(f"release:{RELEASE}")
    assert context_error(bloom, emulated) < TOLERANCE
    assert tree_error(bloom, emulated) < TOLERANCE


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("give_positions(self, spread_position_ids(", "give_positions(self, (lambda ids, *_: ids * 0)("),
        (f"low = self.positions - high * {DIGIT_BASE}", "low = self.positions - high * 64"),
        ("places[0, heads:rest, 0:4:2] = 1", "places[0, 0:heads, 0:4:2] = 1"),
        ("places[1, heads:rest, 1:4:2] = 1", "places[1, heads:rest, 0:4:2] = 1"),
    ],
)
def test_a_fault_in_the_patched_source_shows(bloom, right, wrong):
    assert right in bloom.source
    faulty = dataclasses.replace(bloom, source=bloom.source.replace(right, wrong))
    assert context_error(faulty, faulty.emulate()) > 100 * TOLERANCE


def test_without_the_trees_depths_the_nodes_are_wrong(bloom):
    alone = bloom.source.replace("(past, 1) + offsets", "(past, 1) + offsets * 0")
    assert alone != bloom.source
    faulty = dataclasses.replace(bloom, source=alone)
    assert context_error(faulty, faulty.emulate()) < TOLERANCE
    assert tree_error(faulty, faulty.emulate(f"release:{RELEASE}")) > 100 * TOLERANCE


def test_lost_slopes_show(bloom):
    name = "transformer.layers.1.attention.qkv.bias"
    bias = bloom.fitted.tensors[name].clone()
    bias.view(-1, 128)[:4, :4] = 0
    fitted = dataclasses.replace(bloom.fitted, tensors={**bloom.fitted.tensors, name: bias})
    faulty = dataclasses.replace(bloom, fitted=fitted)
    assert tree_error(faulty, faulty.emulate()) > 100 * TOLERANCE


def test_bfloat16_keeps_the_bound_that_waves_miss():
    written, folded = (
        measure_attention("bloom 96", 16, 96, 1.0, 3.0, "bfloat16", transform, queries=4)["logit_error_nats"]
        for transform in ("write_positions", "fold_alibi")
    )
    assert written < 1e-3
    assert folded > ERROR_BOUND_NATS


@pytest.mark.parametrize("heads", [3, 16, 32, 40, 112])
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 5e-4), ("float32", 1e-5)])
def test_two_parts_hold_every_slope(heads, dtype, bound):
    slopes = alibi_slopes(heads)
    parts = slope_parts(slopes, 128, dtype)
    assert torch.equal(parts, parts.to(getattr(torch, dtype)).float())
    assert measure_slopes(slopes, parts, 128, 8192) < bound
    one_part = parts.clone()
    one_part[:, 2:] = 0
    if dtype == "bfloat16" and heads > 16:
        assert measure_slopes(slopes, one_part, 128, 8192) > 0.025


def test_digits_are_held_exactly_up_to_the_longest_sequence():
    positions = np.array([0, 1, DIGIT_BASE - 1, DIGIT_BASE, 4097, DIGIT_BASE * LARGEST_DIGIT - 1])
    high, low = positions // DIGIT_BASE, positions % DIGIT_BASE
    for digit in (high, low):
        assert torch.equal(torch.from_numpy(digit).bfloat16().long(), torch.from_numpy(digit))


def plan(shape, wanted="auto"):
    return plan_fit(shape, kernel_profile(f"release:{RELEASE}"), wanted)


@pytest.mark.parametrize(
    ("changed", "names", "exact"),
    [
        ({"head_size": 64}, ("write_positions",), True),
        ({"head_size": 112, "max_seq_len": 32768}, ("write_positions",), True),
        ({"head_size": 120}, ("write_positions",), True),
        ({}, ("truncate_heads", "write_positions"), False),
        ({"dtype": "float16"}, ("truncate_heads", "fold_alibi"), False),
        ({"dtype": "float16", "head_size": 64}, ("fold_alibi",), False),
    ],
)
def test_the_type_decides_what_stands_for_alibi(changed, names, exact):
    found = plan(dataclasses.replace(BLOOM_7B1, **changed))
    assert (found.names, found.exact) == (names, exact)
    assert not [gate for gate in found.gates if gate.verdict in ("refused", "silent")]
    assert found.mends["write_positions" if "write_positions" in names else "fold_alibi"]


def test_pipeline_ranks_get_waves():
    ranks = {"mapping": {"pp_size": 2}}
    shape, profile = dataclasses.replace(BLOOM_7B1, head_size=64), kernel_profile(f"release:{RELEASE}")
    assert plan_fit(shape, profile, config=ranks).names == ("fold_alibi",)
    with pytest.raises(PortFileError) as raised:
        plan_fit(shape, profile, ["write_positions"], config=ranks)
    assert "pipeline ranks" in raised.value.message


def test_four_dims_are_all_that_a_truncation_gives_up():
    assert plan(BLOOM_7B1).steps[0].arguments == {"keep": 124}


@pytest.mark.parametrize(
    ("changed", "wanted", "problem"),
    [
        ({"dtype": "float16"}, ["truncate_heads", "write_positions"], "summed in float32"),
        ({"kv_dtype": "fp8"}, ["truncate_heads", "write_positions"], "fp8 cache"),
        ({"kv_dtype": "int8"}, ["truncate_heads", "fold_alibi"], "int8 cache"),
        ({"max_seq_len": 40000}, ["truncate_heads", "write_positions"], "longer than write_positions"),
        ({"max_seq_len": 40000}, "auto", "longer than write_positions"),
        ({}, ["write_positions"], "no room"),
        ({}, ["truncate_heads", "fold_alibi", "write_positions"], "stands for ALiBi already"),
        ({}, ["truncate_heads:126", "write_positions"], "cannot keep 126"),
        ({"position_kind": "rope_gpt_neox"}, ["write_positions"], "its positions are rope_gpt_neox"),
    ],
)
def test_what_cannot_be_written_is_refused(changed, wanted, problem):
    with pytest.raises(PortFileError) as raised:
        plan(dataclasses.replace(BLOOM_7B1, **changed), wanted)
    assert problem in raised.value.message


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_a_cache_of_eight_bits_is_far_too_coarse_for_waves(cache):
    fit = fit_alibi(alibi_slopes(16), 32, 2048)
    keys = wave_biases(fit, 128, 16, "float16")[1].double()
    angle = torch.arange(2048)[:, None].double() * torch.from_numpy(frequencies(fit.base, 32))
    turned = rotate_front(keys[:, None].expand(-1, 2048, -1), angle)
    if cache == "fp8":
        rounded = turned.to(torch.float8_e4m3fn).double()
    else:
        step = turned.abs().max() / 127  # the best that one scale of the cache can do
        rounded = (turned / step).round() * step
    amplitude = torch.from_numpy(np.hypot(fit.cosine, fit.sine)) / keys[:, :32]
    queries = torch.cat((amplitude, torch.zeros_like(amplitude)), 1)
    error = ((rounded - turned) * queries[:, None]).sum(-1)
    assert float(error.abs().max()) > 3 * ERROR_BOUND_NATS


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_no_fit_is_found_for_a_cache_of_eight_bits(cache):
    with pytest.raises(BaseModelError, match="the gate 'ALiBi'") as raised:
        plan(dataclasses.replace(BLOOM_7B1, kv_dtype=cache))
    assert f"{cache} cache" in raised.value.next_step


CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_size": 64,
    "hidden_size": 256,
    "position_embedding_type": "alibi",
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("changed", "arguments", "problem"),
    [
        ({"dtype": "float16"}, {}, "summed in float32"),
        ({}, {"length_tokens": 32769}, "two digits"),
        ({"position_embedding_type": "rope_gpt_neox"}, {}, "no ALiBi"),
        ({"q_scaling": 2.0}, {}, "scaling folded first"),
        ({"clip_qkv": 8.0}, {}, "clip_qkv"),
        ({}, {"head_size": 64}, "no room"),
    ],
)
def test_models_that_cannot_be_written_are_refused(changed, arguments, problem):
    with pytest.raises(ConversionError, match=problem):
        write_positions({**CONFIG, **changed}, {}, **{"head_size": 128, "length_tokens": 256, **arguments})


def test_later_pipeline_ranks_are_refused(bloom):
    plan = SimpleNamespace(pp_size=2, dims={"H": 4, "K": 4, "D": 64}, base=SimpleNamespace(layers=()))
    with pytest.raises(ConversionError, match="every pipeline rank"):
        TargetFit(bloom.plan).refit_plan(plan, bloom.config)


def test_the_source_is_changed_once(bloom):
    again = write_position_source(bloom.source)
    assert (again.source, again.changed) == (bloom.source, False)


def test_a_model_without_position_ids_is_refused(bloom):
    from porting_kit.patching.medusa_module import patch_architecture

    patched = patch_architecture(bloom.tree, "BloomForCausalLM").source
    assert write_position_source(patched).changed
    with pytest.raises(PatchError, match="positions cannot be computed"):
        write_position_source(patched.replace("position_ids=None,", "places=None,"))


@pytest.mark.upstream
@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon-rw"])
def test_upstream_alibi_models_write_their_positions(source, family):
    model = fit_toy(family, SIZE_64, source=source, engine_dtype="bfloat16")
    assert model.plan.names == ("write_positions",)
    emulated = model.emulate(f"release:{RELEASE}")
    assert context_error(model, emulated) < TOLERANCE
    assert tree_error(model, emulated) < TOLERANCE
