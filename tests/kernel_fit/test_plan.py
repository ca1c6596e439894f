"""Which transforms are chosen, in what order of preference, and what is refused with which words."""

import dataclasses

import pytest

from porting_kit.errors import BaseModelError, PortFileError
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.releases.kernels import kernel_profile
from porting_kit.releases.shape import AttentionShape

EARLY, MIDDLE, LATE = "0.9.0.dev2024022700", "0.11.0.dev2024062500", "0.17.0"
BLOOM_7B1 = AttentionShape(128, 32, 32, "float16", position_kind="alibi", max_seq_len=2048)
BLOOM_560M = dataclasses.replace(BLOOM_7B1, head_size=64, query_heads=16, kv_heads=16)
QWEN2_7B = AttentionShape(128, 28, 4, "bfloat16", max_seq_len=2048)
SMOLLM2 = AttentionShape(64, 9, 3, "float16", max_seq_len=2048)
JAIS = dataclasses.replace(BLOOM_560M, q_scaling=64**-0.5)


def plan(shape, release, wanted="auto", **config):
    return plan_fit(shape, kernel_profile(f"release:{release}"), wanted, config={"num_hidden_layers": 2, **config})


@pytest.mark.parametrize(
    ("shape", "release", "names"),
    [
        (QWEN2_7B, MIDDLE, ()),
        (QWEN2_7B, EARLY, ("pad_query_groups",)),
        (SMOLLM2, MIDDLE, ("pad_head_size",)),
        (SMOLLM2, EARLY, ("pad_head_size", "pad_query_groups")),
        (SMOLLM2, LATE, ()),
        (BLOOM_560M, MIDDLE, ("fold_alibi",)),
        (BLOOM_560M, LATE, ("fold_alibi",)),
        (BLOOM_7B1, MIDDLE, ("truncate_heads", "fold_alibi")),
        (JAIS, MIDDLE, ("fold_scale", "fold_alibi")),
        (dataclasses.replace(QWEN2_7B, q_scaling=1.2), MIDDLE, ("fold_scale",)),
        (dataclasses.replace(BLOOM_7B1, head_size=80), MIDDLE, ("fold_alibi",)),
        (dataclasses.replace(BLOOM_7B1, head_size=96), MIDDLE, ("fold_alibi",)),
        (dataclasses.replace(BLOOM_560M, query_heads=48), EARLY, ("fold_alibi", "pad_query_groups")),
    ],
)
def test_cheapest_combination_is_chosen(shape, release, names):
    found = plan(shape, release)
    assert found.names == names
    assert not [gate for gate in found.gates if gate.verdict in ("refused", "silent")]
    assert {gate.name for gate in found.gates if gate.verdict == "mended"} == {
        name for mended in found.mends.values() for name in mended
    }


def test_cost_is_counted_in_cache_bytes():
    found = plan(SMOLLM2, MIDDLE)
    assert found.cache_bytes_per_token == (2 * 2 * 3 * 64 * 2, 2 * 2 * 3 * 128 * 2)
    assert plan(BLOOM_7B1, MIDDLE).cache_bytes_per_token[0] == plan(BLOOM_7B1, MIDDLE).cache_bytes_per_token[1]


def test_exactness_and_length_are_stated():
    assert plan(SMOLLM2, EARLY).exact
    assert plan(SMOLLM2, EARLY).length_tokens is None
    assert not plan(BLOOM_560M, MIDDLE).exact
    assert plan(BLOOM_560M, MIDDLE).length_tokens == 2048
    assert plan(BLOOM_7B1, MIDDLE).needs_activations


def test_off_does_nothing_and_keeps_the_gates():
    found = plan(BLOOM_7B1, MIDDLE, "off")
    assert not found.steps
    assert [gate.name for gate in found.gates if gate.verdict == "silent"] == ["ALiBi"]


def test_exact_kernel_needs_no_fit():
    assert not plan_fit(BLOOM_7B1, kernel_profile("exact")).steps


@pytest.mark.parametrize(
    ("shape", "config", "gate"),
    [
        (dataclasses.replace(QWEN2_7B, head_size=256), {}, "head size"),
        (dataclasses.replace(QWEN2_7B, softcap=50.0), {}, "logit soft-cap"),
        (dataclasses.replace(QWEN2_7B, position_kind="learned_absolute"), {}, "positions outside the kernel"),
        (dataclasses.replace(QWEN2_7B, tokens_per_block=16), {}, "tokens per block"),
        (BLOOM_560M, {"clip_qkv": 6.0}, "head size"),
    ],
)
def test_gate_that_no_transform_mends_is_named(shape, config, gate):
    with pytest.raises(BaseModelError, match=f"the gate '{gate}'"):
        plan(shape, MIDDLE, **config)


@pytest.mark.parametrize(
    ("shape", "wanted", "problem"),
    [
        (QWEN2_7B, ["fold_alibi"], "fold_alibi cannot be applied"),
        (QWEN2_7B, ["fold_scale"], "fold_scale cannot be applied"),
        (QWEN2_7B, ["pad_head_size"], "pad_head_size cannot be applied"),
        (BLOOM_560M, ["pad_head_size"], "use fold_alibi"),
        (BLOOM_560M, ["pad_query_groups"], "a power of two"),
        (BLOOM_7B1, ["fold_alibi"], "add truncate_heads"),
        (BLOOM_7B1, ["truncate_heads"], "add fold_alibi"),
        (BLOOM_7B1, ["truncate_heads:127", "fold_alibi"], "cannot keep 127"),
        (QWEN2_7B, ["truncate_heads", "fold_alibi"], "truncate_heads cannot be applied"),
        (BLOOM_7B1, ["fold_alibl"], "did you mean fold_alibi"),
        (BLOOM_7B1, ["fold_alibi:3"], "takes no such value"),
        (dataclasses.replace(BLOOM_560M, max_seq_len=20_000), ["fold_alibi"], "longer than fold_alibi can follow"),
        (dataclasses.replace(BLOOM_7B1, max_seq_len=100_000), "auto", "longer than fold_alibi can follow"),
    ],
)
def test_fit_by_name_that_cannot_apply_is_an_error(shape, wanted, problem):
    with pytest.raises(PortFileError, match=problem):
        plan(shape, MIDDLE, wanted)


def test_named_fit_is_taken_in_the_right_order():
    found = plan(BLOOM_7B1, MIDDLE, ["fold_alibi", "truncate_heads:96"])
    assert [str(step) for step in found.steps] == [
        "truncate_heads (keep 96)",
        "fold_alibi (head_size 128, length_tokens 2048, content_size 96)",
    ]


@pytest.mark.parametrize(("length", "keep"), [(512, 116), (1024, 116), (1025, 112), (8192, 112)])
def test_short_texts_leave_more_dims_to_the_content(length, keep):
    found = plan(dataclasses.replace(BLOOM_7B1, max_seq_len=length), MIDDLE)
    assert found.steps[0].arguments == {"keep": keep}
    assert found.steps[1].arguments["content_size"] == keep
    named = plan(dataclasses.replace(BLOOM_7B1, max_seq_len=length), MIDDLE, ["truncate_heads", "fold_alibi"])
    assert named.steps == found.steps


def test_plans_need_neither_torch_nor_numpy():
    import subprocess
    import sys

    code = (
        "import sys; from porting_kit.kernel_fit.plan import plan_fit; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
