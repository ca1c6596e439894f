"""Known mistakes of cutting, planted into the rank files of a healthy checkpoint. Each changes all ranks in place."""

from __future__ import annotations

import torch

Ranks = list[dict[str, torch.Tensor]]


def split_fused(part: torch.Tensor, heads: int, kv_heads: int, size: int) -> list[torch.Tensor]:
    """One rank's fused rows as query, key and value."""
    return list(part.split([heads * size, kv_heads * size, kv_heads * size]))


def exchange_parts(ranks: Ranks, name: str) -> None:
    """Ranks 0 and 1 hold each other's part of one tensor."""
    ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]


def cut_bias_equally(ranks: Ranks, name: str, heads: int, kv_heads: int, size: int) -> None:
    """The fused bias in equal runs. Sizes are those of one rank, whose key/value heads are its own."""
    parts = [split_fused(rank[name], heads, kv_heads, size) for rank in ranks]
    whole = torch.cat([torch.cat([part[k] for part in parts]) for k in range(3)])
    for rank, chunk in zip(ranks, whole.chunk(len(ranks)), strict=True):
        rank[name] = chunk.clone()


def deal_kv_heads(ranks: Ranks, name: str, heads: int, size: int) -> None:
    """Two key/value heads on four ranks dealt 0 1 0 1, where 0 0 1 1 is right: ranks 1 and 2 have each other's."""
    one, two = (split_fused(rank[name], heads, 1, size) for rank in ranks[1:3])
    ranks[1][name] = torch.cat([one[0], *two[1:]])
    ranks[2][name] = torch.cat([two[0], *one[1:]])


def repeat_bias(ranks: Ranks, name: str) -> None:
    """A bias that belongs to the first rank alone, on all of them."""
    for rank in ranks[1:]:
        rank[name] = ranks[0][name].clone()
