"""What a tree is worth: costs are read strictly, larger batches lead to smaller trees, and the truth is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from porting_kit.errors import TreeError
from porting_kit.medusa.step_costs import StepCosts, rate_tree, read_step_costs, require_costs, word_worth
from porting_kit.medusa.tree_choice import TreeLimits, shares_from_accuracy, trace_curve

ACCURACY = [(0.68, 0.85), (0.33, 0.55), (0.18, 0.37)]
COSTS = {1: 10, 8: 11, 16: 12, 64: 19}


def best(costs, batch: int):
    curve = trace_curve(shares_from_accuracy(ACCURACY, TreeLimits()), TreeLimits())
    worths = [rate_tree(point.nodes, point.mean_tokens, costs, batch) for point in curve.points]
    return max(worths, key=lambda worth: worth.speed_up or 0.0)


def test_a_public_case_gets_a_small_tree_and_an_honest_figure():
    """Heads with 0.68, 0.33 and 0.18: a user saw fewer steps and more time with a large tree."""
    chosen = best(read_step_costs(COSTS), 1)
    assert chosen.nodes <= 20
    assert chosen.speed_up < 2.2
    assert f"{chosen.tokens_per_step:.2f} tokens a step" in word_worth(chosen, 1)


def test_a_larger_batch_gets_a_smaller_tree():
    costs = read_step_costs({1: 10, 64: 11, 128: 14, 256: 25, 512: 50, 2048: 200})
    sizes = [best(costs, batch).nodes for batch in (1, 4, 16, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_a_gain_that_is_not_worth_it_is_called_so():
    worth = rate_tree(16, 1.4, read_step_costs({1: 10, 16: 13}), 1)
    assert word_worth(worth, 1).endswith("against 1 in 10.00 ms: not worth it")
    assert not word_worth(rate_tree(16, 2.4, read_step_costs({1: 10, 16: 13}), 1), 1).endswith("not worth it")


def test_nothing_is_claimed_beyond_what_was_measured():
    costs = read_step_costs(COSTS)
    assert costs.cost(12) == pytest.approx(11.5)
    assert costs.cost(65) is None
    assert rate_tree(64, 3.0, costs, 2).speed_up is None
    assert "nothing is said about speed" in word_worth(rate_tree(64, 3.0, None, 1), 1)


def test_a_time_above_that_of_a_larger_step_is_other_work():
    """A busy moment at the 2 nodes: without a correction 3 nodes look like a bargain against them."""
    costs = StepCosts.from_measured({12: 5.0, 1: 4.0, 2: 7.0, 3: 4.5, 4: 4.5})
    assert costs == StepCosts((1, 2, 3, 4, 12), (4.0, 4.5, 4.5, 4.5, 5.0))
    greedy_busy = StepCosts.from_measured({4: 20.0, 8: 11.0, 256: 19.0})
    assert rate_tree(64, 3.0, greedy_busy, 4).speed_up == pytest.approx(3.0 * 11 / 19)


@pytest.mark.parametrize(
    "content",
    [
        '{"8": 1.0}',
        '{"1": 1.0}',
        '{"1": 0, "8": 2}',
        '{"1": 1, "x": 2}',
        '{"1": 1, "8": "2"}',
        "[1, 2]",
        "{",
        '{"1": NaN, "2": 1}',
        '{"1": 10, "8": 5, "64": 19}',
    ],
)
def test_costs_that_cannot_be_used_are_refused(content: str, tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(TreeError):
        read_step_costs(file)
    file.write_text(json.dumps({"1": 1.0, "8": 1.5}))
    assert read_step_costs(file).cost(8) == 1.5


@pytest.mark.parametrize(
    ("sizes", "nodes", "batch"), [((1, 8), 2, 16), ((1, 16), 2, 16), ((2, 64), 2, 1), ((1, 3), 4, 1)]
)
def test_costs_that_do_not_reach_the_tree_are_refused(sizes: tuple[int, ...], nodes: int, batch: int):
    with pytest.raises(TreeError, match=f"do not reach a tree at batch {batch}"):
        require_costs(StepCosts(sizes, (10.0, 11.0)), nodes, batch)
    require_costs(StepCosts((batch, nodes * batch), (10.0, 11.0)), nodes, batch)


@pytest.mark.parametrize("accuracy", [[], [(0.5, 0.4)], [(-0.1, 0.5)], [(0.5, 1.5)]])
def test_figures_that_are_no_accuracies_are_refused(accuracy: list):
    with pytest.raises(TreeError, match="no accuracies"):
        shares_from_accuracy(accuracy, TreeLimits())
