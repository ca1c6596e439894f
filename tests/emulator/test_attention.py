"""gpt_attention against loops in float64: every option, both phases, unequal requests, and faults that must show."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.replay import RecordedStep
from porting_kit.errors import EmulatorError
from tests.emulator.naive_attention import (
    Layer,
    NaiveCache,
    attend_naive,
    call_attention,
    chain,
    draft_tree,
    new_cache,
    pack_mask,
)

LAYERS = {
    "neox": Layer(),
    "neox, one key head": Layer(K=1),
    "neox, equal heads": Layer(K=4),
    "neox, part of the head": Layer(rotary_dim=4),
    "gptj": Layer(kind="rope_gptj"),
    "gptj, part of the head": Layer(kind="rope_gptj", rotary_dim=4),
    "linear scaling": Layer(scale_type="linear", scale=2.0),
    "dynamic scaling": Layer(scale_type="dynamic", scale=2.0, max_positions=6),
    "ALiBi": Layer(kind="alibi", slopes=(0.5, 0.25, 0.125, 0.0625)),
    "ALiBi, equal heads": Layer(kind="alibi", K=4, slopes=(0.5, 0.25, 0.125, 0.0625)),
    "learned": Layer(kind="learned_absolute"),
    "q_scaling": Layer(q_scaling=2.5),
    "soft-cap": Layer(softcap=1.5),
    "soft-cap and ALiBi": Layer(kind="alibi", softcap=1.5, slopes=(0.5, 0.25, 0.125, 0.0625)),
    "window": Layer(window=4),
    "window and ALiBi": Layer(kind="alibi", window=4, slopes=(0.5, 0.25, 0.125, 0.0625)),
}
LENGTHS = [5, 9]
TREE, DEPTHS = draft_tree([-1, 0, 0, 1, 1, 2])


def random_rows(layer: Layer, count: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, (layer.H + 2 * layer.K) * layer.D, generator=generator, dtype=torch.float64).to(dtype)


def run_context(layer: Layer, dtype: torch.dtype, lengths: list[int] = LENGTHS):
    """Prefill both sides; (emulator cache, naive cache, emulator output, naive output)."""
    cache, naive = new_cache(layer, len(lengths)), NaiveCache(len(lengths))
    qkv = random_rows(layer, sum(lengths), 0, dtype)
    step = AttentionStep(cache=cache, context_lengths=lengths, context_slots=list(range(len(lengths))))
    output = call_attention(layer, step, qkv)
    parts = qkv.split(lengths)
    expected = [
        attend_naive(layer, naive, index, part, range(len(part)), chain(len(part))) for index, part in enumerate(parts)
    ]
    return cache, naive, output, torch.cat(expected)


def run_tree(layer: Layer, cache, naive, dtype: torch.dtype, *, visible=TREE, depths=DEPTHS, kernel=None):
    """One tree step on both sides, batch of all cached requests; the naive side always uses the true tree."""
    B, N = len(naive.rows), len(TREE)
    qkv = random_rows(layer, B * N, 1, dtype)
    step = AttentionStep(
        cache=cache,
        generation_lengths=[N] * B,
        generation_slots=list(range(B)),
        pasts=[len(rows) for rows in naive.rows],
        is_speculative=True,
        kernel=kernel,
    )
    output = call_attention(
        layer,
        step,
        qkv,
        spec_decoding_packed_mask=pack_mask(visible).repeat(B, 1),
        spec_decoding_position_offsets=torch.tensor(depths, dtype=torch.int32).repeat(B, 1),
    )
    expected = [attend_naive(layer, naive, b, part, DEPTHS, TREE) for b, part in enumerate(qkv.split(N))]
    return output, torch.cat(expected)


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((output.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_context_and_tree_match_loops(name: str) -> None:
    layer = LAYERS[name]
    cache, naive, output, expected = run_context(layer, torch.float64)
    # Rotary tables and ALiBi slopes are float32 by definition of the argument.
    assert error(output, expected) < 1e-6
    output, expected = run_tree(layer, cache, naive, torch.float64)
    assert error(output, expected) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("name", ["neox", "ALiBi", "soft-cap", "window"])
def test_other_types_match_within_their_rounding(name: str, dtype: torch.dtype, bound: float) -> None:
    layer = LAYERS[name]
    cache, naive, output, expected = run_context(layer, dtype)
    assert output.dtype is dtype
    assert error(output, expected) < bound
    output, expected = run_tree(layer, cache, naive, dtype)
    assert error(output, expected) < bound


def test_ordinary_generation_and_equal_pasts() -> None:
    layer = Layer()
    cache, naive, _, _ = run_context(layer, torch.float64, [6, 6])
    for index in range(3):
        qkv = random_rows(layer, 2, 10 + index)
        step = AttentionStep(
            cache=cache,
            generation_lengths=[1, 1],
            generation_slots=[0, 1],
            pasts=[len(rows) for rows in naive.rows],
        )
        output = call_attention(layer, step, qkv)
        expected = torch.cat([attend_naive(layer, naive, b, qkv[b : b + 1], [0], chain(1)) for b in range(2)])
        assert error(output, expected) < 1e-6


def test_mixed_call_of_context_and_generation() -> None:
    layer = LAYERS["ALiBi"]
    cache = new_cache(layer, 3)
    naive = NaiveCache(3)
    first = random_rows(layer, sum(LENGTHS), 0)
    call_attention(layer, AttentionStep(cache=cache, context_lengths=LENGTHS, context_slots=[0, 1]), first)
    for b, part in enumerate(first.split(LENGTHS)):
        attend_naive(layer, naive, b, part, range(len(part)), chain(len(part)))
    N = len(TREE)
    qkv = random_rows(layer, 4 + 2 * N, 2)
    step = AttentionStep(
        cache=cache,
        context_lengths=[4],
        context_slots=[2],
        generation_lengths=[N, N],
        generation_slots=[0, 1],
        pasts=LENGTHS,
        is_speculative=True,
    )
    output = call_attention(
        layer,
        step,
        qkv,
        spec_decoding_packed_mask=pack_mask(TREE).repeat(2, 1),
        spec_decoding_position_offsets=torch.tensor(DEPTHS, dtype=torch.int32).repeat(2, 1),
    )
    parts = qkv.split([4, N, N])
    expected = [attend_naive(layer, naive, 2, parts[0], range(4), chain(4))]
    expected += [attend_naive(layer, naive, b, parts[1 + b], DEPTHS, TREE) for b in range(2)]
    assert error(output, torch.cat(expected)) < 1e-6


def test_trees_of_unequal_sizes() -> None:
    layer = Layer()
    cache, naive, _, _ = run_context(layer, torch.float64)
    lengths = [6, 3]
    qkv = random_rows(layer, sum(lengths), 3)
    step = AttentionStep(
        cache=cache,
        generation_lengths=lengths,
        generation_slots=[0, 1],
        pasts=LENGTHS,
        is_speculative=True,
    )
    packed = pack_mask(TREE)
    output = call_attention(
        layer,
        step,
        qkv,
        spec_decoding_packed_mask=torch.cat([packed, packed[:3]]),
        spec_decoding_position_offsets=torch.tensor(DEPTHS, dtype=torch.int32).repeat(2, 1),
    )
    parts = qkv.split(lengths)
    expected = [attend_naive(layer, naive, 0, parts[0], DEPTHS, TREE)]
    expected.append(attend_naive(layer, naive, 1, parts[1], DEPTHS[:3], TREE[:3, :3]))
    assert error(output, torch.cat(expected)) < 1e-6


def test_a_tree_of_more_than_32_nodes_uses_the_second_word() -> None:
    layer = Layer(D=4, rotary_dim=4)
    visible, depths = draft_tree([-1, *range(39)])
    cache, naive = new_cache(layer, 1), NaiveCache(1)
    qkv = random_rows(layer, 40, 4)
    step = AttentionStep(cache=cache, generation_lengths=[40], generation_slots=[0], pasts=[0], is_speculative=True)
    output = call_attention(
        layer,
        step,
        qkv,
        spec_decoding_packed_mask=pack_mask(visible),
        spec_decoding_position_offsets=torch.tensor([depths], dtype=torch.int32),
    )
    assert error(output, attend_naive(layer, naive, 0, qkv, depths, visible)) < 1e-6


def test_long_prompts_are_biased_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("porting_kit.emulator.attention.BIAS_BLOCK_ELEMENTS", 4 * 9 * 2)
    for name in ("ALiBi", "window", "window and ALiBi"):
        _, _, output, expected = run_context(LAYERS[name], torch.float64)
        assert error(output, expected) < 1e-6, name


def test_faults_show() -> None:
    """A wrong mask bit, lost offsets, a lost past, other slopes: each is far outside the bounds above."""
    for name, fault in (
        ("neox", {"visible": chain(6)}),
        ("neox", {"depths": [0] * 6}),
        ("ALiBi", {"depths": list(range(6))}),
        ("window", {"depths": [0, 1, 1, 3, 3, 3]}),
    ):
        layer = LAYERS[name]
        cache, naive, _, _ = run_context(layer, torch.float64)
        output, expected = run_tree(layer, cache, naive, torch.float64, **fault)
        assert error(output, expected) > 1e-3, (name, fault)
    one_bit = TREE.clone()
    one_bit[5, 1] = True
    cache, naive, _, _ = run_context(Layer(), torch.float64)
    output, expected = run_tree(Layer(), cache, naive, torch.float64, visible=one_bit)
    difference = (output - expected).abs().amax(-1).view(2, 6)
    assert bool((difference[:, 5] > 1e-3).all())
    assert bool((difference[:, :5] < 1e-6).all())


def test_several_tokens_without_a_tree_are_refused() -> None:
    layer = Layer()
    cache, naive, _, _ = run_context(layer, torch.float64)
    step = AttentionStep(cache=cache, generation_lengths=[6, 6], generation_slots=[0, 1], pasts=LENGTHS)
    with pytest.raises(EmulatorError, match="Only speculative decoding mode supports input length > 1"):
        call_attention(layer, step, random_rows(layer, 12, 1))
    assert len(naive.rows[0]) == LENGTHS[0]


@pytest.mark.parametrize(
    "extra",
    [
        {"relative_attention_bias": torch.zeros(1)},
        {"do_cross_attention": True},
        {"a_name_of_a_later_release": 3},
        {"vision_start": 4},
    ],
    ids=str,
)
def test_arguments_that_change_the_result_are_not_ignored(extra: dict) -> None:
    layer = dataclasses.replace(Layer(), extra=extra)
    step = AttentionStep(cache=new_cache(layer, 1), context_lengths=[3], context_slots=[0])
    with pytest.raises(EmulatorError, match=next(iter(extra))):
        call_attention(layer, step, random_rows(layer, 3, 0))


def test_a_tree_that_belongs_to_other_requests_is_refused() -> None:
    layer = Layer()
    cache, _, _, _ = run_context(layer, torch.float64)
    step = AttentionStep(
        cache=cache, generation_lengths=[6, 6], generation_slots=[0, 1], pasts=LENGTHS, is_speculative=True
    )
    with pytest.raises(EmulatorError, match="does not belong to this step"):
        call_attention(
            layer,
            step,
            random_rows(layer, 12, 1),
            spec_decoding_packed_mask=pack_mask(TREE),
            spec_decoding_position_offsets=torch.zeros(2, 6, dtype=torch.int32),
        )


@pytest.mark.parametrize("name", ["neox", "gptj, part of the head", "ALiBi", "soft-cap", "window and ALiBi"])
def test_a_step_as_it_is_recorded_matches_loops(name: str) -> None:
    """Pasts as a tensor, attention over more cache rows than any request has: what a CUDA graph replays."""
    layer = LAYERS[name]
    cache, naive, _, _ = run_context(layer, torch.float64)
    N = len(TREE)
    qkv = random_rows(layer, 2 * N, 1)
    step = RecordedStep(
        cache=cache,
        generation_lengths=[N, N],
        generation_slots=[0, 1],
        pasts=[0, 0],
        is_speculative=True,
        past_buffer=torch.tensor(LENGTHS).unsqueeze(1),
        end=40,
    )
    output = call_attention(
        layer,
        step,
        qkv,
        spec_decoding_packed_mask=pack_mask(TREE).repeat(2, 1),
        spec_decoding_position_offsets=torch.tensor(DEPTHS, dtype=torch.int32).repeat(2, 1),
    )
    expected = [attend_naive(layer, naive, b, part, DEPTHS, TREE) for b, part in enumerate(qkv.split(N))]
    assert error(output, torch.cat(expected)) < 1e-6
