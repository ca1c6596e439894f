"""Pictures of heads: agreement by head against chance, acceptance by node of a tree, nodes against tokens per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from porting_kit.display.plots import BLUE, GREEN, GREY, ORANGE, RED, Picture, _axes, _legend_above, plot_tree
from porting_kit.medusa.tree import MedusaTree


def plot_head_agreement(heads: Sequence[Mapping[str, Any]]) -> Picture:
    """Top-1 and top-5 agreement of each head with the base's own text, and chance.

    Args:
        heads: rows with `top1`, `top5` and `chance1`, as in the document of `heads check`.
    """
    places = range(len(heads))
    with _axes(height=3.2) as (axes, finish):
        for shift, key, color, label in ((-0.2, "top1", BLUE, "top-1"), (0.2, "top5", ORANGE, "top-5")):
            bars = axes.bar(
                [p + shift for p in places], [100 * head[key] for head in heads], 0.38, color=color, label=label
            )
            axes.bar_label(bars, [f"{100 * head[key]:.0f}" for head in heads], padding=2)
        for place, head in zip(places, heads, strict=True):
            chance = 100 * head["chance1"]
            axes.plot([place - 0.42, place + 0.02], [chance] * 2, color=RED, linestyle="--", linewidth=1.8)
        axes.plot([], [], color=RED, linestyle="--", label="chance (top-1)")
        axes.set_xticks(list(places), [f"head {place + 1}" for place in places])
        axes.set_ylabel("agreement with the base (%)")
        axes.set_ylim(0, 108)
        _legend_above(axes)
    words = "; ".join(f"head {p + 1} {100 * h['top1']:.0f} % and {100 * h['top5']:.0f} %" for p, h in enumerate(heads))
    return Picture(finish.png, f"Top-1 and top-5 agreement with the base's own text: {words}")


def plot_node_shares(tree: MedusaTree, shares: Mapping[tuple[int, ...], float]) -> Picture:
    """The tree with, at each node, the share of steps that accept it.

    Args:
        tree: the tree.
        shares: path -> share of steps.
    """
    labels = {node: f"{100 * shares[path]:.0f} %" for node, path in enumerate(tree.nodes) if path in shares}
    picture = plot_tree(tree, tokens=labels)
    total = 1 + sum(shares.values())
    return Picture(picture.png, f"{picture.alt}; share of steps that accept each node, {total:.2f} tokens a step")


def plot_tree_choice(rows: Sequence[Mapping[str, Any]], measured: Mapping[int, float] | None = None) -> Picture:
    """Nodes against tokens per step: the best trees, the stock tree, and what decoding measured.

    Args:
        rows: rows of the document of `heads tree`; the last one is the stock tree.
        measured: nodes -> tokens per step of a decode loop.
    """
    *best, stock = rows
    with _axes(height=3.4) as (axes, finish):
        sizes, values = [row["nodes"] for row in best], [row["tokens_per_step"] for row in best]
        axes.plot(sizes, values, color=BLUE, linewidth=2, label="best tree of that size")
        axes.plot([stock["nodes"]], [stock["tokens_per_step"]], "s", color=GREY, markersize=8, label="stock tree")
        if measured:
            axes.plot(list(measured), list(measured.values()), "o", color=GREEN, markersize=7, label="measured")
        axes.set_xlabel("nodes, the root included")
        axes.set_ylabel("tokens per step")
        axes.set_ylim(bottom=1)
        _legend_above(axes)
    words = f"{values[0]:.2f} tokens a step with {sizes[0]} nodes, {values[-1]:.2f} with {sizes[-1]}"
    return Picture(finish.png, f"Best trees: {words}; the stock tree gives {stock['tokens_per_step']:.2f}")
