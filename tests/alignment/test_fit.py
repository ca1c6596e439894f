"""How far a rounded base may lie from the original is measured on another rounding of the same width."""

import pytest
import torch

from porting_kit.alignment.fit import bound_by_rounding, measure_fit

POSITIONS, V = 200, 50


class Logits:
    """A logits source that answers with given rows."""

    vocab_size = V

    def __init__(self, rows):
        self.rows = rows

    def logits(self, texts):
        return [self.rows]


def moved(base, size, seed):
    return Logits(base.rows + size * torch.randn(POSITIONS, V, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def base():
    return Logits(3 * torch.randn(POSITIONS, V, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("size", [0.01, 0.1, 1.0])
@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (1.0, True), (2.0, False)])
def test_an_error_of_the_same_width_passes_and_a_wider_one_fails(base, size, factor, passes):
    """Divergence goes with the square of the error: twice the width is four times the divergence."""
    rounded = measure_fit(base, moved(base, size, 1), [[0] * POSITIONS], (), 0.0)
    bounds = bound_by_rounding(rounded, POSITIONS)
    port = moved(base, factor * size, 2)
    assert measure_fit(base, port, [[0] * POSITIONS], ("weights in FP8",), 0.0, bounds).passed is passes


def test_one_position_that_is_far_off_fails(base):
    bounds = bound_by_rounding(measure_fit(base, moved(base, 0.01, 1), [[0] * POSITIONS], (), 0.0), POSITIONS)
    port = moved(base, 0.01, 2)
    port.rows[7] = port.rows[7].flip(0)
    found = measure_fit(base, port, [[0] * POSITIONS], (), 0.0, bounds)
    assert found.largest_divergence > bounds["largest_divergence"]
    assert not found.passed
