"""How good heads are, from one table of ranks: accuracy per head, the best tree, tokens per step.

The rank of a head at a position is the place of the base's own later token in the head's order (0: the head says it
first). Greedy acceptance depends on nothing else: a path (k_0, k_1, ...) of the tree is accepted as far as the ranks of
heads 0, 1, ... at that position are k_0, k_1, ... . So the tokens per step of any tree follow exactly, by replaying
the steps over the stored continuations, without decoding again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.errors import TreeError
from porting_kit.medusa.heads import MedusaHeads
from porting_kit.medusa.self_distillation import IGNORED, Continuations

UNKNOWN_RANK = -1
CHUNK_POSITIONS = 4096


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
        logits = heads(hidden.float(), lambda x: output_matrix(x.to(output_matrix.weight.dtype)).float())  # [M, B, V]
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


def choose_paths(ranks: torch.Tensor, *, num_nodes: int, max_rank: int = 10) -> tuple[tuple[int, ...], ...]:
    """The Medusa choices that are accepted most often.

    A node is worth how often its whole path agrees with the base. A child's count never exceeds its parent's, so the
    most frequent paths always hang together as a tree, and no other tree of their number is worth more per position.

    Args:
        ranks: [rows, C - 1, M].
        num_nodes: N, the root included.
        max_rank: ranks from here on are not considered.

    Returns:
        N - 1 paths or fewer, shorter ones first.
    """
    if num_nodes < 2:
        raise TreeError("a tree needs a node besides its root", expected="at least 2 nodes", found=num_nodes)
    counts: Counter[tuple[int, ...]] = Counter()
    for row in ranks.flatten(0, 1).tolist():
        for depth, rank in enumerate(row, start=1):
            if not 0 <= rank < max_rank:
                break
            counts[tuple(row[:depth])] += 1
    # of equal counts the shorter path comes first, so that no child comes before its parent
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path))[: num_nodes - 1]
    return tuple(sorted(best, key=lambda path: (len(path), path)))


def replay_steps(ranks: torch.Tensor, paths: Sequence[Sequence[int]]) -> float:
    """Mean tokens that one Medusa step gives, the base's own token included, replayed over stored continuations.

    Args:
        ranks: [rows, C - 1, M].
        paths: Medusa choices.

    Returns:
        tokens per step; 1.0 when no draft is ever accepted.
    """
    nodes = {tuple(path) for path in paths}
    tokens = steps = 0
    for row in ranks.tolist():
        position = 0
        while position < len(row) and row[position][0] != UNKNOWN_RANK:
            accepted = 0
            while accepted < len(row[position]) and tuple(row[position][: accepted + 1]) in nodes:
                accepted += 1
            tokens += accepted + 1
            steps += 1
            position += accepted + 1
    return tokens / max(1, steps)
