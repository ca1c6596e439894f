"""The best tree for given heads: from measured joint ranks, for every number of nodes, under limits.

What heads accept together is counted, never multiplied from single accuracies: a path is worth the share of positions
at which its whole row of ranks is what the base said. The mean number of drafts accepted at a position is the sum of
these shares over the tree's nodes. A path is never worth more than its parent, so for a fixed number k of first-level
nodes the best tree of n nodes is those k and the n - k most valuable deeper paths below them: any other choice of the
same size has a smaller sum, and this one is closed under prefixes. First-level ranks must have no gap (both runtimes
number them so), hence the loop over k; k is at most 16. That is exact, and a test compares it with all trees.

Exact for the mean over all positions. Decoding visits some positions more often than others, which depends on the tree;
`head_ranks.replay_tree` gives the tokens per step that decoding has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porting_kit.errors import TreeError
from porting_kit.medusa.head_ranks import RANKS_OF_TREES, UNKNOWN_RANK
from porting_kit.medusa.named_trees import TreePath
from porting_kit.medusa.tree import MedusaTree
from porting_kit.medusa.tree_limits import MAX_DRAFT_NODES, MAX_RANK


@dataclass(frozen=True)
class TreeLimits:
    """What a tree may be.

    Args:
        max_nodes: N at most, the root included.
        max_depth: levels at most; None: as many as there are heads.
        max_rank: the largest rank a path may use.
    """

    max_nodes: int = MAX_DRAFT_NODES + 1
    max_depth: int | None = None
    max_rank: int = MAX_RANK

    def __post_init__(self) -> None:
        wrong = []
        if not 2 <= self.max_nodes <= MAX_DRAFT_NODES + 1:
            wrong.append(f"max_nodes {self.max_nodes}: 2 to {MAX_DRAFT_NODES + 1}, the root included")
        if self.max_depth is not None and self.max_depth < 1:
            wrong.append(f"max_depth {self.max_depth}: 1 or more")
        if not 0 <= self.max_rank <= MAX_RANK:
            wrong.append(f"max_rank {self.max_rank}: 0 to {MAX_RANK}")
        if wrong:
            raise TreeError(
                "The limits leave no tree",
                expected="limits that the runtimes can hold",
                items=wrong,
                next_step="Change --max-nodes or --max-depth.",
            )


@dataclass(frozen=True)
class PathShares:
    """How often each path is accepted whole.

    Args:
        shares: path -> share of positions, only of paths that were seen, at most as many of each depth as a tree holds.
        positions: positions counted.
    """

    shares: dict[TreePath, float]
    positions: int


@dataclass(frozen=True)
class TreePoint:
    """The best tree of one size.

    Args:
        nodes: N, the root included.
        mean_tokens: tokens of a step at a position drawn at random, the base's own token included.
        first_level: k, nodes of the first level.
    """

    nodes: int
    mean_tokens: float
    first_level: int


@dataclass(frozen=True)
class TreeCurve:
    """The best tree of every size from 2 nodes up, without sizes at which the last node is worth nothing."""

    shares: PathShares
    points: tuple[TreePoint, ...]

    def tree(self, nodes: int) -> MedusaTree:
        """The tree of `nodes` nodes.

        Raises:
            TreeError: the curve has no tree of that size.
        """
        point = next((point for point in self.points if point.nodes == nodes), None)
        if point is None:
            raise TreeError(
                f"There is no best tree of {nodes} nodes",
                expected=f"2 to {self.points[-1].nodes} nodes",
                found=nodes,
                next_step="Allow more nodes, or measure on more text.",
            )
        first, deeper = _split(self.shares, point.first_level)
        paths = [*first, *deeper[: nodes - 1 - point.first_level]]
        return MedusaTree.from_choices(paths, name=f"best of {nodes} nodes")


def count_paths(ranks: torch.Tensor, limits: TreeLimits) -> PathShares:
    """Share of positions at which each path is accepted whole.

    Args:
        ranks: int64 [rows, positions, M] of `head_ranks.measure_ranks`. Positions behind which fewer than M tokens are
            known are left out: they would count as refusals of the later heads.
        limits: depth and rank.

    Raises:
        TreeError: no position at which every head's rank is known.
    """
    flat = ranks.flatten(0, -2)
    flat = flat[(flat != UNKNOWN_RANK).all(-1)]
    if not len(flat):
        raise TreeError(
            "There is no position to choose a tree from",
            expected=f"continuations longer than the {ranks.shape[-1]} heads",
            found=f"{ranks[..., 0].numel()} positions, none with every later token known",
            next_step="Continue more or longer prompts.",
        )
    depth = ranks.shape[-1] if limits.max_depth is None else min(limits.max_depth, ranks.shape[-1])
    shares: dict[TreePath, float] = {}
    # A path is the number of its parent among the paths seen one level up, and its last rank: any depth fits.
    levels: list[torch.Tensor] = []
    inside, numbers = flat, torch.zeros(len(flat), dtype=torch.int64)
    for level in range(depth):
        is_inside = inside[:, level] <= limits.max_rank
        inside, numbers = inside[is_inside], numbers[is_inside]
        codes = numbers * RANKS_OF_TREES + inside[:, level]
        codes, numbers, counts = codes.unique(return_inverse=True, return_counts=True)
        levels.append(codes)
        order = torch.argsort(-counts, stable=True)[: MAX_DRAFT_NODES if level else None]
        for number, count in zip(order.tolist(), counts[order].tolist(), strict=True):
            shares[_read_path(levels, number)] = count / len(flat)
    return PathShares(shares, len(flat))


def _read_path(levels: list[torch.Tensor], number: int) -> TreePath:
    """The ranks of path `number` of the last level."""
    ranks = []
    for codes in reversed(levels):
        number, rank = divmod(int(codes[number]), RANKS_OF_TREES)
        ranks.append(rank)
    return tuple(reversed(ranks))


def shares_from_accuracy(accuracy: list[tuple[float, float]], limits: TreeLimits) -> PathShares:
    """Path shares from a table of top-1 and top-5 accuracies alone, for heads of which nothing else is known.

    Assumes what measured ranks need not: that heads agree independently, and that ranks 1 to 4 share their part in
    halves. Only a first look; measure joint ranks for a choice.

    Args:
        accuracy: (top-1, top-5) of each head.
        limits: depth and rank.

    Raises:
        TreeError: figures that are no accuracies.
    """
    if not accuracy or any(not 0 <= top1 <= top5 <= 1 for top1, top5 in accuracy):
        raise TreeError(
            "These are no accuracies",
            expected="0 <= top-1 <= top-5 <= 1 for each head",
            found=accuracy,
            next_step="Give shares of positions from 0 to 1.",
        )
    falling = [8 / 15, 4 / 15, 2 / 15, 1 / 15]
    by_rank = [[top1, *((top5 - top1) * part for part in falling)][: limits.max_rank + 1] for top1, top5 in accuracy]
    shares: dict[TreePath, float] = {}
    level: dict[TreePath, float] = {(): 1.0}
    for chances in by_rank[: limits.max_depth]:
        level = {(*path, rank): share * p for path, share in level.items() for rank, p in enumerate(chances) if p > 0}
        level = dict(sorted(level.items(), key=lambda item: (-item[1], item[0]))[:MAX_DRAFT_NODES])
        shares |= level
    return PathShares(shares, 0)


def trace_curve(shares: PathShares, limits: TreeLimits) -> TreeCurve:
    """The best tree of every size up to `limits.max_nodes`.

    Raises:
        TreeError: no first-level path was ever accepted.
    """
    best: dict[int, tuple[float, int]] = {}
    # A deep share needs its first-level rank, and a gap below that rank costs nodes that are worth little.
    for first_level in range(1, limits.max_rank + 2):
        first, deeper = _split(shares, first_level)
        if shares.shares.get(first[-1], 0.0) == 0.0:
            continue
        value = sum(shares.shares.get(path, 0.0) for path in first)
        for nodes in range(1 + first_level, limits.max_nodes + 1):
            if nodes > 1 + first_level:
                if nodes - 2 - first_level >= len(deeper):
                    break
                value += shares.shares[deeper[nodes - 2 - first_level]]
            if value > best.get(nodes, (0.0, 0))[0]:
                best[nodes] = (value, first_level)
    if not best:
        raise TreeError(
            "The heads are never right, so no tree is of use",
            expected="a first-level candidate that is accepted somewhere",
            found=f"{shares.positions} positions, none accepted",
            next_step="Check the heads: porting-kit heads check.",
        )
    points: list[TreePoint] = []
    for nodes, (value, first_level) in sorted(best.items()):
        # Where too few paths were seen, a larger tree can only be had with nodes that are worth nothing.
        if not points or 1 + value > points[-1].mean_tokens:
            points.append(TreePoint(nodes, 1 + value, first_level))
    return TreeCurve(shares, tuple(points))


def choose_paths(ranks: torch.Tensor, *, num_nodes: int) -> tuple[TreePath, ...]:
    """The best tree of `num_nodes` nodes, or the largest there is, as Medusa choices, shorter paths first."""
    if num_nodes < 2:
        raise TreeError(
            "a tree needs a node besides its root",
            expected="at least 2 nodes",
            found=num_nodes,
            next_step="Allow 2 nodes or more.",
        )
    limits = TreeLimits(max_nodes=min(num_nodes, MAX_DRAFT_NODES + 1))
    curve = trace_curve(count_paths(ranks, limits), limits)
    return curve.tree(curve.points[-1].nodes).nodes[1:]


def _split(shares: PathShares, first_level: int) -> tuple[list[TreePath], list[TreePath]]:
    """First-level paths 0 .. k - 1, and the deeper ones below them, most valuable first, no child before its parent."""
    first = [(rank,) for rank in range(first_level)]
    deeper = [path for path in shares.shares if len(path) > 1 and path[0] < first_level]
    return first, sorted(deeper, key=lambda path: (-shares.shares[path], len(path), path))
