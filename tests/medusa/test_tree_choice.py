"""The chosen tree is the best one: against every tree of its size, under each limit, and against a decode loop."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from porting_kit.errors import TreeError
from porting_kit.medusa.head_ranks import UNKNOWN_RANK, replay_tree
from porting_kit.medusa.tree_choice import TreeLimits, count_paths, shares_from_accuracy, trace_curve


def make_ranks(seed: int, positions: int = 300, heads: int = 2, ranks: int = 4) -> torch.Tensor:
    """Ranks of heads that depend on each other, the first level's most frequent rank not the lowest."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.tensor([1, 0, 3, 3, 1])[torch.randint(5, (positions,), generator=generator)]
    rows = [first]
    for _ in range(heads - 1):
        own = torch.randint(ranks, (positions,), generator=generator)
        rows.append(torch.where(first % 2 == 1, first, own))
    return torch.stack(rows, dim=1)[None]


def every_tree(drafts: int, ranks: int, depth: int) -> list[set[tuple[int, ...]]]:
    paths = [path for level in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=level)]
    trees = (set(chosen) for chosen in itertools.combinations(paths, drafts))
    return [
        tree
        for tree in trees
        if all((len(p) == 1 or p[:-1] in tree) and (len(p) > 1 or p[0] == 0 or (p[0] - 1,) in tree) for p in tree)
    ]


def worth(tree, rows) -> float:
    return sum(tuple(row[: len(path)]) == path for path in tree for row in rows) / len(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_no_tree_of_the_same_size_is_better(seed: int, drafts: int):
    ranks = make_ranks(seed)
    limits = TreeLimits(max_nodes=drafts + 1)
    curve = trace_curve(count_paths(ranks, limits), limits)
    found = {point.nodes: point for point in curve.points}
    trees = every_tree(drafts, 4, 2)
    rows = ranks[0].tolist()
    best = max(worth(tree, rows) for tree in trees)
    if drafts + 1 in found:
        assert found[drafts + 1].mean_tokens == pytest.approx(1 + best)
        assert worth(curve.tree(drafts + 1).nodes[1:], rows) == pytest.approx(best)
        # the check can fail: there is a worse tree of the same size
        assert drafts == 1 or min(worth(tree, rows) for tree in trees) < best


def test_a_gap_in_the_first_level_is_filled_or_avoided():
    """Rank 3 is right most often; with three drafts it cannot be had, with four it is the best choice."""
    rows = [[3, 0]] * 6 + [[0, 0]] * 2 + [[0, 1]] * 2 + [[1, 1]]
    limits = TreeLimits(max_nodes=5)
    curve = trace_curve(count_paths(torch.tensor([rows]), limits), limits)
    by_nodes = {point.nodes: curve.tree(point.nodes).choices() for point in curve.points}
    assert by_nodes[4] == [[0], [0, 0], [0, 1]]
    assert by_nodes[5] == [[0], [1], [2], [3]]


def test_joint_ranks_count_and_single_accuracies_do_not():
    """Heads that are right half of the time each, and never together: no second level pays."""
    ranks = torch.tensor([[[0, 9], [9, 0]] * 50])
    limits = TreeLimits(max_nodes=3, max_rank=8)
    shares = count_paths(ranks, limits).shares
    assert shares == {(0,): 0.5}
    independent = shares_from_accuracy([(0.5, 0.5), (0.5, 0.5)], limits).shares
    assert independent[(0, 0)] == 0.25


def test_positions_with_an_unknown_later_token_are_left_out():
    ranks = torch.tensor([[[0, 0], [0, UNKNOWN_RANK]]])
    assert count_paths(ranks, TreeLimits()).shares == {(0,): 1.0, (0, 0): 1.0}
    with pytest.raises(TreeError, match="no position"):
        count_paths(ranks[:, 1:], TreeLimits())


@pytest.mark.parametrize("heads", [15, 16, 17, 20])
def test_many_heads_are_counted_and_replayed(heads: int):
    """Rows that differ in their last rank alone; sixteen ranks of four bits fill 64, and one more does not fit."""
    rows = torch.zeros(1, 8, heads, dtype=torch.long)
    rows[0, 6:, -1] = 15
    shares = count_paths(rows, TreeLimits()).shares
    assert shares[(0,) * heads] == 0.75
    assert shares[(*(0,) * (heads - 1), 15)] == 0.25
    assert len(shares) == heads + 1
    chain = [(0,) * depth for depth in range(1, heads + 1)]
    last = rows[:, [7] * 4]
    assert replay_tree(last, chain).tokens_per_step == heads
    widest = [*chain, (*(0,) * (heads - 1), 15)]
    assert replay_tree(last, widest).tokens_per_step == heads + 1
    assert replay_tree(last.where(last == 0, 16), widest).tokens_per_step == heads


def test_limits_are_kept():
    ranks = make_ranks(5, heads=3, ranks=6, positions=2000)
    limits = TreeLimits(max_nodes=20, max_depth=2, max_rank=2)
    curve = trace_curve(count_paths(ranks, limits), limits)
    for point in curve.points:
        tree = curve.tree(point.nodes)
        assert tree.num_nodes == point.nodes <= 20
        assert tree.depth <= 2
        assert max(tree.top_k_per_level) <= 3
    with pytest.raises(TreeError, match="no best tree of 64 nodes"):
        curve.tree(64)


@pytest.mark.parametrize("limits", [{"max_nodes": 1}, {"max_nodes": 65}, {"max_depth": 0}, {"max_rank": 16}])
def test_limits_that_no_runtime_can_hold_are_refused(limits: dict):
    with pytest.raises(TreeError, match="limits leave no tree"):
        TreeLimits(**limits)


def test_heads_that_are_never_right_give_no_tree():
    limits = TreeLimits()
    with pytest.raises(TreeError, match="never right"):
        trace_curve(count_paths(torch.full((2, 5, 2), 400), limits), limits)


def test_the_choice_takes_less_than_a_second():
    torch.manual_seed(0)
    ranks = torch.distributions.Geometric(0.4).sample((400, 127, 4)).long()
    started = time.perf_counter()
    limits = TreeLimits()
    curve = trace_curve(count_paths(ranks, limits), limits)
    replay_tree(ranks, curve.tree(64).nodes[1:])
    assert time.perf_counter() - started < 1.0
    means = [point.mean_tokens for point in curve.points]
    assert means == sorted(means)


def test_replay_says_where_steps_end():
    ranks = torch.tensor([[[0, 1], [5, 5], [5, 5], [2, 0], [1, 0], [0, UNKNOWN_RANK]]])
    steps = replay_tree(ranks, [(0,), (1,), (0, 1)])
    assert (steps.tokens, steps.steps) == (6, 3)
    assert steps.accepted_by_depth == pytest.approx((2 / 3, 1 / 3))
    assert steps.node_shares == pytest.approx({(0,): 1 / 3, (1,): 1 / 3, (0, 1): 1 / 3})
