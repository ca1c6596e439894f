"""Trees that have a name, as data. A digit is a rank, a group of digits is one path: `021` is [0, 2, 1].

`mc_sim_7b_63` is the tree the C++ runtime falls back to (cpp/include/tensorrt_llm/runtime/medusaModule.h,
0.13.0.dev2024090300) and the one examples/medusa/README.md prints; it was tuned for one 7B model with four heads.
The order of the listing matters for trimming: the most useful nodes come first.

`small_H` are trees for H heads with 7, 11 and 15 draft nodes: 8, 12 and 16 tokens in one verification step.
"""

from __future__ import annotations

from itertools import product

TreePath = tuple[int, ...]

_LISTINGS = {
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005
        0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """,
    "small_2": "0 00 1 01 2 10 02",
    "small_3": "0 00 1 01 000 2 10 02 001 010 100",
    "small_4": "0 00 1 01 000 2 10 02 0000 3 001 20 03 010 100",
}

NAMED_CHOICES: dict[str, tuple[TreePath, ...]] = {
    name: tuple(tuple(int(rank) for rank in path) for path in listing.split()) for name, listing in _LISTINGS.items()
}


def chain_choices(num_heads: int) -> tuple[TreePath, ...]:
    """The best token of each head and nothing else: one path of `num_heads` nodes."""
    return tuple((0,) * depth for depth in range(1, num_heads + 1))


def cartesian_choices(top_k_per_level: tuple[int, ...]) -> tuple[TreePath, ...]:
    """Every combination of the first k candidates of each head, level by level."""
    return tuple(
        path
        for depth in range(1, len(top_k_per_level) + 1)
        for path in product(*(range(top_k) for top_k in top_k_per_level[:depth]))
    )
