"""fold_alibi against Hugging Face: fit error, context, tree, and the release whose kernels drop ALiBi."""

import os

import pytest
import torch

from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.alibi import ERROR_BOUND_NATS, fold_alibi
from tests.emulator.toy_models import ToySize
from tests.kernel_fit.fitted_models import RELEASE, context_error, fit_toy, tree_error

SOURCES = [source for source in os.environ.get("TRTLLM_SOURCE", "").split(":") if source]
SIZE_64 = ToySize(hidden_size=256, heads=4, kv_heads=4)
LOGIT_TOLERANCE = 2e-3
"""Largest error of the toy models' output logits, which are of order 5."""


@pytest.fixture(scope="module", params=[1.0, 3.0], ids=["random logits", "three times sharper"])
def bloom(request):
    return fit_toy("bloom", SIZE_64, sharpness=request.param)


def test_fit_error_stays_within_its_bound(bloom):
    (note,) = bloom.fitted.notes
    assert not note.exact
    assert note.figures["logit_error_nats"] <= ERROR_BOUND_NATS
    assert note.figures["floor_nats"] <= -19.5


def test_fitted_bloom_is_right_where_the_release_drops_alibi(bloom):
    emulated = bloom.emulate(f"release:{RELEASE}")
    assert context_error(bloom, emulated) < LOGIT_TOLERANCE
    assert tree_error(bloom, emulated) < LOGIT_TOLERANCE


def test_dropping_alibi_is_far_outside(bloom):
    rows = bloom.fitted.config["num_attention_heads"] * bloom.fitted.config["head_size"]
    names = [name for name in bloom.fitted.tensors if name.endswith("qkv.bias")]
    kept = {name: bloom.fitted.tensors[name].clone() for name in names}
    pairs = bloom.fitted.notes[0].figures["pairs"]
    try:
        for name in names:
            queries = bloom.fitted.tensors[name][:rows].view(-1, bloom.fitted.config["head_size"])
            queries[:, : 2 * pairs] = 0
        assert tree_error(bloom, bloom.emulate()) > 20 * LOGIT_TOLERANCE
    finally:
        for name, tensor in kept.items():
            bloom.fitted.tensors[name].copy_(tensor)


def test_wrong_base_is_far_outside(bloom):
    wrong = {**bloom.fitted.config, "rotary_base": 1.3 * bloom.fitted.config["rotary_base"]}
    assert context_error(bloom, bloom.emulate(config=wrong)) > 20 * LOGIT_TOLERANCE


@pytest.mark.parametrize(("head", "pairs"), [(80, 24), (96, 16)])
def test_heads_of_80_and_96_dims_leave_room_enough(head, pairs):
    model = fit_toy("bloom", ToySize(hidden_size=3 * head, heads=3, kv_heads=3))
    (note,) = model.fitted.notes
    assert note.figures["pairs"] == pairs
    assert note.figures["logit_error_nats"] <= ERROR_BOUND_NATS
    assert tree_error(model, model.emulate(f"release:{RELEASE}")) < LOGIT_TOLERANCE


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.1), ("bfloat16", 0.8)])
def test_half_precision_adds_its_own_rounding_only(dtype, bound):
    model = fit_toy("bloom", SIZE_64, dtype=dtype)
    assert model.fitted.config["dtype"] == dtype
    assert {tensor.dtype for tensor in model.fitted.tensors.values()} == {getattr(torch, dtype)}
    assert tree_error(model, model.emulate(f"release:{RELEASE}")) < bound


@pytest.mark.upstream
@pytest.mark.skipif(not SOURCES, reason="TRTLLM_SOURCE names no TensorRT-LLM checkout")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("bloom", SIZE_64),
        ("mpt", SIZE_64),
        ("falcon-rw", SIZE_64),
        ("falcon-rw", ToySize(hidden_size=240, heads=3, kv_heads=3)),
    ],
)
def test_upstream_alibi_models_follow_the_fit(source, family, size):
    model = fit_toy(family, size, source=source)
    emulated = model.emulate(f"release:{RELEASE}")
    assert context_error(model, emulated) < LOGIT_TOLERANCE
    assert tree_error(model, emulated) < LOGIT_TOLERANCE


CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_size": 64,
    "hidden_size": 256,
    "position_embedding_type": "alibi",
    "dtype": "float16",
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("changed", "arguments", "problem"),
    [
        ({"position_embedding_type": "rope_gpt_neox"}, {}, "no ALiBi to fold"),
        ({"q_scaling": 2.0}, {}, "scaling folded first"),
        ({"clip_qkv": 8.0}, {}, "clip_qkv"),
        ({}, {"head_size": 64}, "no room"),
        ({"head_size": 120}, {"length_tokens": 4096}, "closely enough"),
    ],
)
def test_models_that_cannot_be_folded_are_refused(changed, arguments, problem):
    with pytest.raises(ConversionError, match=problem):
        fold_alibi({**CONFIG, **changed}, {}, **{"head_size": 128, "length_tokens": 256, **arguments})


def test_dims_in_use_are_not_overwritten():
    tensors = {"l.attention.qkv.weight": torch.ones(3 * 256, 256), "l.attention.dense.weight": torch.ones(256, 256)}
    with pytest.raises(ConversionError, match="uses dims"):
        fold_alibi(CONFIG, tensors, head_size=64, length_tokens=256, content_size=48)


def test_config_says_what_the_kernel_must_do(bloom):
    config = bloom.fitted.config
    assert config["position_embedding_type"] == "rope_gpt_neox"
    assert config["rotary_pct"] * config["head_size"] == 2 * bloom.fitted.notes[0].figures["pairs"]
    assert config["max_position_embeddings"] >= bloom.plan.length_tokens
    assert config["kernel_fit"]["steps"][0]["name"] == "fold_alibi"
    assert config["kernel_fit"]["length_tokens"] == bloom.plan.length_tokens
