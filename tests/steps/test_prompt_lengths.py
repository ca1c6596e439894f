"""Prompts on one side of the length at which a base becomes another function."""

import pytest

from porting_kit.architectures.base_config import read_base_config
from porting_kit.errors import PortFileError
from porting_kit.steps.prompt_lengths import keep_below, note_lengths

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "max_position_embeddings": 256,
}  # fmt: skip


def test_a_text_that_would_cross_is_cut_from_the_front():
    prompts = [list(range(length)) for length in (3, 20, 21, 40)]
    kept, said = keep_below(prompts, 12, 32)
    assert kept == [prompts[0], prompts[1], list(range(1, 21)), list(range(20, 40))]
    assert said.startswith("2 cut to their last 20 tokens")
    assert "not covered" in said


def test_the_drafts_of_a_step_count():
    kept, _ = keep_below([[1] * 40], 12, 32, draft_tokens=15)
    assert kept == [[1] * 5]


def test_nothing_is_said_where_nothing_is_cut():
    prompts = [[1, 2, 3], [4] * 100]
    assert keep_below(prompts, 12, None) == (prompts, None)
    assert keep_below(prompts, 12, 112) == (prompts, None)


def test_more_new_tokens_than_fit_are_the_ports_mistake():
    with pytest.raises(PortFileError) as caught:
        keep_below([[1]], 24, 32, draft_tokens=8)
    assert "below 24" in str(caught.value)
    assert "new_tokens: 12" in caught.value.next_step
    with pytest.raises(PortFileError, match="cross the length") as caught:
        keep_below([[1]], 24, 32, draft_tokens=40)
    assert "smaller tree" in caught.value.next_step


@pytest.mark.parametrize(
    ("scaling", "threshold"),
    [
        (None, None),
        ({"type": "linear", "factor": 2.0}, None),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}, 128),
    ],
)
def test_only_scalings_that_follow_the_length_have_a_threshold(scaling, threshold):
    assert read_base_config({**SIZES, "rope_scaling": scaling}).length_threshold == threshold


def test_lengths_that_no_text_reaches_are_said_to_be_left_out():
    prompts = [[1] * 3, [1] * 40]
    window = {"the sliding window acts": 64}
    assert note_lengths(prompts, 12, {"the sliding window acts": None}) is None
    assert "no text reaches 64 tokens" in note_lengths(prompts, 12, window)
    assert note_lengths(prompts, 25, window).startswith("texts on both sides of 64 tokens")
    assert "shorter ones are not covered" in note_lengths([[1] * 65, [1] * 90], 12, window)


def test_prompts_that_cannot_show_a_fault_of_batching_are_said_to_leave_it_out():
    assert "batches are not covered" in note_lengths([[1, 2]], 12, {})
    assert "unequal lengths are not covered" in note_lengths([[1, 2], [3, 4]], 12, {})
    assert note_lengths([[1, 2], [3]], 12, {}) is None
