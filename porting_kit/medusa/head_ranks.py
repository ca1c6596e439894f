"""How good heads are, from one table of ranks: accuracy per head, the best tree, tokens per step.

The rank of a head at a position is the place of the base's own later token in the head's order (0: the head says it
first). Greedy acceptance depends on nothing else: a path (k_0, k_1, ...) of the tree is accepted as far as the ranks of
heads 0, 1, ... at that position are k_0, k_1, ... . So the tokens per step of any tree follow exactly, by replaying
the steps over the stored continuations, without decoding again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.medusa.heads import MedusaHeads, apply_output_matrix
from porting_kit.medusa.self_distillation import IGNORED, Continuations

UNKNOWN_RANK = -1
CHUNK_POSITIONS = 4096
RANKS_OF_TREES = 16
"""Ranks of a tree lie below this (tree_limits.MAX_RANK)."""


@dataclass(frozen=True)
class HeadAccuracy:
    """How often head `head`'s first, or one of its first five, tokens is what the base said, of `positions`."""

    head: int
    top1: float
    top5: float
    positions: int


@torch.no_grad()
def measure_ranks(heads: MedusaHeads, continuations: Continuations, output_matrix: torch.nn.Module) -> torch.Tensor:
    """Rank of the base's token in every head's order.

    Args:
        heads: M heads, in fp32.
        continuations: rows of C tokens.
        output_matrix: the base's `lm_head`.

    Returns:
        ranks int64 [rows, C - 1, M] on the CPU; UNKNOWN_RANK where the base said nothing any more.
    """
    targets = continuations.targets(heads.num_heads)
    parts = []
    flat_targets = targets.flatten(0, 1).split(CHUNK_POSITIONS)
    for hidden, target in zip(continuations.hidden.flatten(0, 1).split(CHUNK_POSITIONS), flat_targets, strict=True):
        logits = heads(hidden.float(), lambda x: apply_output_matrix(output_matrix, x).float())  # [M, B, V]
        known = target.T != IGNORED
        of_target = logits.gather(-1, target.T.clamp(min=0).unsqueeze(-1))
        ranks = (logits > of_target).sum(-1)
        parts.append(ranks.masked_fill(~known, UNKNOWN_RANK).T.cpu())
    return torch.cat(parts).view(targets.shape)


def measure_accuracy(ranks: torch.Tensor) -> tuple[HeadAccuracy, ...]:
    """Top-1 and top-5 accuracy of each head from ranks [rows, C - 1, M]."""
    figures = []
    for head in range(ranks.shape[-1]):
        known = ranks[..., head][ranks[..., head] != UNKNOWN_RANK]
        figures.append(
            HeadAccuracy(head, float((known < 1).float().mean()), float((known < 5).float().mean()), known.numel())
        )
    return tuple(figures)


@dataclass(frozen=True)
class ReplayedSteps:
    """What decoding with a tree does, replayed over stored continuations.

    Args:
        tokens: tokens emitted by the steps.
        steps: how many steps.
        accepted_by_depth: share of steps that accept at least 1, 2, ... drafts.
        node_shares: path -> share of steps that accept the node.
    """

    tokens: int
    steps: int
    accepted_by_depth: tuple[float, ...]
    node_shares: dict[tuple[int, ...], float]

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step, the base's own token included."""
        return self.tokens / max(1, self.steps)


def replay_tree(ranks: torch.Tensor, paths: Sequence[Sequence[int]]) -> ReplayedSteps:
    """Decode with a tree over stored continuations: exactly the steps that decoding takes, without the model.

    Args:
        ranks: [rows, C - 1, M].
        paths: the tree's nodes without the root, closed under prefixes, ranks below 16.

    Returns:
        the steps. With no draft ever accepted a step gives one token.
    """
    lengths = torch.zeros(ranks.shape[:2], dtype=torch.long)
    going = torch.ones_like(lengths, dtype=torch.bool)
    numbers = {(): 0, **{tuple(path): number for number, path in enumerate(paths, start=1)}}
    children = torch.full((len(numbers), RANKS_OF_TREES), -1)
    for path, number in list(numbers.items())[1:]:
        children[numbers[path[:-1]], path[-1]] = number
    nodes = torch.zeros_like(lengths)
    for rank in ranks[..., : max(map(len, paths))].unbind(-1):
        nodes = children[nodes, rank.clamp(0, RANKS_OF_TREES - 1)]
        going &= (rank >= 0) & (rank < RANKS_OF_TREES) & (nodes >= 0)
        nodes = nodes.clamp(min=0)
        lengths += going
    known = torch.cat([ranks[..., 0] != UNKNOWN_RANK, torch.zeros(len(ranks), 1, dtype=torch.bool)], dim=1)
    rows, position = torch.arange(len(ranks)), torch.zeros(len(ranks), dtype=torch.long)
    visited = torch.zeros_like(lengths, dtype=torch.bool)
    while bool((running := known[rows, position]).any()):
        rows, position = rows[running], position[running]
        visited[rows, position] = True
        position = (position + lengths[rows, position] + 1).clamp(max=ranks.shape[1])
    accepted, stepped = lengths[visited], ranks[visited]
    steps = len(accepted)
    counts = {
        tuple(path): int(((stepped[:, : len(path)] == torch.tensor(path)).all(-1)).sum()) for path in map(list, paths)
    }
    return ReplayedSteps(
        tokens=int(accepted.sum()) + steps,
        steps=steps,
        accepted_by_depth=tuple(float((accepted >= d).double().mean()) for d in range(1, 1 + max(map(len, paths)))),
        node_shares={path: count / max(1, steps) for path, count in counts.items()},
    )


def replay_steps(ranks: torch.Tensor, paths: Sequence[Sequence[int]]) -> float:
    """Tokens per step of `replay_tree`."""
    return replay_tree(ranks, paths).tokens_per_step
