"""Lengths that an alignment's prompts leave out are said."""

from porting_kit.steps.prompt_lengths import note_lengths


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
