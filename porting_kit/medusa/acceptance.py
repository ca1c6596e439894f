"""Greedy acceptance: which drafts of a tree the base model confirms, and what is drafted next.

Source of the rules: tensorrt_llm/runtime/generation.py (`find_best_medusa_path`, `filter_medusa_logits`,
`get_next_medusa_tokens`), 0.8 to 0.14. Everything is a batched tensor operation; nothing here runs per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.errors import TreeError
from porting_kit.medusa.tree import MedusaTree

PADDING = -1


@dataclass(frozen=True)
class Acceptance:
    """What one verification step confirmed; A = depth + 1.

    Args:
        rows: int64 [B, A], node indices along the accepted path, the root first, padded with -1. These are the
            rows whose keys and values stay in the cache.
        tokens: int64 [B, A], the tokens emitted: the base's choice at each of those nodes, padded with -1.
        lengths: int64 [B], how many, at least 1.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def last_rows(self) -> torch.Tensor:
        """int64 [B]: the last accepted node, where the next drafts are read."""
        return self.rows.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def last_tokens(self) -> torch.Tensor:
        """int64 [B]: the last emitted token, the next root."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]


def accept_greedy(node_tokens: torch.Tensor, target_tokens: torch.Tensor, tree: MedusaTree) -> Acceptance:
    """Walk every path while the child's token is what the base chose at its parent; the longest wins.

    Of two equally long walks the first path in tree order wins, as in the Python runtime; siblings of one parent never
    hold the same token, so both are then the same nodes.

    Args:
        node_tokens: int [B, N], the token at each node.
        target_tokens: int [B, N], the base's top token after each node.
        tree: the tree of the step.
    """
    paths = tree.paths.to(node_tokens.device)  # [P, A]
    children = torch.cat((paths[:, 1:], torch.full_like(paths[:, :1], PADDING)), dim=1)
    nodes, depths = paths.clamp(min=0), torch.arange(paths.shape[1], device=paths.device)
    agrees = (node_tokens[:, children.clamp(min=0)] == target_tokens[:, nodes]) & (children >= 0)  # [B, P, A]
    confirmed = torch.where(agrees, paths.shape[1], depths).amin(-1)  # [B, P]: the first node whose child is refused
    longest, best = confirmed.amax(-1), _first_longest(confirmed)
    kept = depths <= longest[:, None]  # [B, A]
    rows = paths[best].masked_fill(~kept, PADDING)
    tokens = target_tokens.gather(1, nodes[best]).masked_fill(~kept, PADDING)
    return Acceptance(rows=rows, tokens=tokens, lengths=longest + 1)


def _first_longest(confirmed: torch.Tensor) -> torch.Tensor:
    """argmax that takes the first of equals on every device."""
    order = torch.arange(confirmed.shape[1], 0, -1, device=confirmed.device)
    return (confirmed * (confirmed.shape[1] + 1) + order).argmax(-1)


def cut_at_end(
    tokens: torch.Tensor, lengths: torch.Tensor, end_ids: Sequence[int] | torch.Tensor, budget: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shorten accepted runs at the first end token (kept) and at the tokens still wanted.

    Args:
        tokens: int64 [B, A], padded with -1.
        lengths: int64 [B].
        end_ids: every id that ends a text; may be empty.
        budget: int64 [B], tokens each request may still emit, at least 1.

    Returns:
        The shortened lengths, int64 [B], and bool [B]: the request has ended.
    """
    width = tokens.shape[1]
    end_tokens = torch.as_tensor(end_ids, dtype=tokens.dtype, device=tokens.device)
    ends = (tokens.unsqueeze(-1) == end_tokens).any(-1)
    ends = ends & (torch.arange(width, device=tokens.device) < lengths[:, None])
    first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, width + 1)
    shortened = torch.minimum(torch.minimum(lengths, first_end), budget)
    return shortened, (first_end <= shortened) | (shortened == budget)


def top_tokens(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The greedy choice, [..., Vp] to int64 [...]; the padding columns from `vocab_size` on never win."""
    return logits[..., :vocab_size].argmax(-1)


def draft_tokens(medusa_logits: torch.Tensor, tree: MedusaTree, vocab_size: int) -> torch.Tensor:
    """The next drafts from the heads' logits at one position.

    Args:
        medusa_logits: [M, B, Vp] at the last accepted node (context phase: at the last prompt token).
        tree: the tree to fill; it may use fewer levels than there are heads.
        vocab_size: V; the padding columns are never drafted.

    Returns:
        int64 [B, N - 1], the tokens of the draft nodes.

    Raises:
        TreeError: more levels than heads, or more candidates than the vocabulary has tokens.
    """
    if tree.depth > medusa_logits.shape[0]:
        raise TreeError(
            f"The tree is {tree.depth} levels deep but the model has {medusa_logits.shape[0]} heads",
            expected=f"at most {medusa_logits.shape[0]} levels",
            found=f"{tree.depth} levels",
            next_step="Trim the tree (tree_limits.trim_tree) or convert more heads.",
        )
    if max(tree.top_k_per_level) > vocab_size:
        raise TreeError(
            "The tree asks a head for more candidates than the vocabulary has tokens",
            expected=f"at most {vocab_size} candidates at each level",
            found=max(tree.top_k_per_level),
            next_step="Trim the tree (tree_limits.trim_tree).",
        )
    # One search for all heads: each takes as many candidates as the head that needs most.
    best = medusa_logits[: tree.depth, :, :vocab_size].topk(max(tree.top_k_per_level), dim=-1).indices
    candidates = [best[head, :, :top_k] for head, top_k in enumerate(tree.top_k_per_level)]
    return torch.cat(candidates, dim=-1)[:, tree.tree_ids[1:].to(medusa_logits.device) - 1]
