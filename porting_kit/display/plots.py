"""Plots: the draft tree, accepted lengths, error layer by layer, margins along a text.

Drawn without pyplot, so nothing global changes and a notebook needs no magic. Colours are Okabe-Ito's, every meaning
has a shape or a line style beside its colour, and text stays legible when a phone scales the picture to 360 pixels.
Each function takes plain numbers; `alt` tells in words what the picture shows.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from porting_kit.medusa.tree import MedusaTree

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
WIDTH_INCHES = 5.4
PIXELS_PER_INCH = 190
SHOWN_WIDTH = 680
LABELLED_NODES = 40


@dataclass(frozen=True)
class Picture:
    """A rendered plot: PNG bytes and the sentence that replaces it for who cannot see it."""

    png: bytes
    alt: str

    def to_html(self) -> str:
        """A figure with the data inside and the words below."""
        data = base64.b64encode(self.png).decode()
        words = html.escape(self.alt, quote=True)
        return (
            f'<figure style="margin:.8em 0;"><img alt="{words}" src="data:image/png;base64,{data}" '
            f'style="max-width:100%;width:{SHOWN_WIDTH}px;height:auto;">'
            f'<figcaption style="opacity:.8;font-size:.9em;">{words}</figcaption></figure>'
        )

    def __str__(self) -> str:
        return f"[plot] {self.alt}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        metadata = {"image/png": {"width": SHOWN_WIDTH, "alt": self.alt}}
        return {"image/png": base64.b64encode(self.png).decode(), "text/plain": str(self)}, metadata


def plot_tree(tree: MedusaTree, *, accepted: Sequence[int] = (), tokens: Mapping[int, str] | None = None) -> Picture:
    """The draft tree, root on the left, one column a head.

    Args:
        tree: any prefix-closed tree.
        accepted: node indices of the accepted path, the root first; drawn thick.
        tokens: text at a node, written beside it instead of its rank.
    """
    heights = _leaf_heights(tree)
    rows = max(heights) + 1
    accepted = [node for node in accepted if node >= 0]
    with _axes(height=min(7.0, 1.7 + 0.14 * rows)) as (axes, finish):
        for node, parent in enumerate(tree.parents[1:], start=1):
            on_path = node in accepted
            axes.plot(
                [len(tree.nodes[parent]), len(tree.nodes[node])],
                [heights[parent], heights[node]],
                color=RED if on_path else GREY,
                linewidth=2.6 if on_path else 0.8,
                zorder=2 if on_path else 1,
            )
        for node, path in enumerate(tree.nodes):
            on_path = node in accepted
            axes.plot(
                len(path),
                heights[node],
                marker="s" if on_path else "o",
                markersize=7 if on_path else 4.5,
                color=RED if on_path else BLUE,
                zorder=3,
            )
        _label_nodes(axes, tree, heights, tokens or {})
        axes.set_xlabel("depth (node proposed by head 1, 2, ...)")
        axes.set_ylabel("candidates, best first")
        axes.set_xticks(range(tree.depth + 1), ["root", *map(str, range(1, tree.depth + 1))])
        axes.set_xlim(-0.15, tree.depth + 0.45)
        axes.set_yticks([])
        axes.margins(y=0.08)
        axes.invert_yaxis()
        axes.grid(False)
    drafts = len(accepted) - 1
    path = f"; accepted path of {drafts} {'draft' if drafts == 1 else 'drafts'} drawn thick" if accepted else ""
    return Picture(finish.png, f"Draft tree: {tree.describe()}{path}")


def plot_accepted_lengths(accepted_by_depth: Sequence[float], *, tokens_per_step: float | None = None) -> Picture:
    """How many tokens each generation step confirmed, as the share of steps.

    Args:
        accepted_by_depth: share of steps that confirmed at least 1, 2, ... drafts, between 0 and 1.
        tokens_per_step: the mean, drawn as a line; that of the shares when None.
    """
    at_least = [1.0, *accepted_by_depth, 0.0]
    shares = [100 * (more - less) for more, less in pairwise(at_least)]
    places = range(1, len(shares) + 1)
    mean = sum(at_least) if tokens_per_step is None else tokens_per_step
    with _axes(height=3.2) as (axes, finish):
        bars = axes.bar(places, shares, color=BLUE, width=0.7)
        labels = axes.bar_label(bars, [f"{share:.0f}" for share in shares], padding=3, zorder=4)
        for label in labels:
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        axes.axvline(mean, color=RED, linestyle="--", linewidth=1.8, label=f"mean {mean:.2f} tokens per step")
        axes.set_xlabel("tokens confirmed in one step")
        axes.set_ylabel("share of steps (%)")
        axes.set_xticks(list(places))
        axes.set_ylim(0, max([*shares, 1]) * 1.18)
        _legend_above(axes)
    spread = ", ".join(f"{place}: {share:.0f} %" for place, share in zip(places, shares, strict=True))
    return Picture(finish.png, f"Tokens confirmed in one step, mean {mean:.2f}; share of steps by number: {spread}")


def plot_layer_errors(
    series: Mapping[str, Sequence[float]], *, names: Sequence[str] = (), noise: float | None = None
) -> Picture:
    """Error of each sub-module's output against the base model, in the order of the forward pass.

    Args:
        series: label (a phase, such as `context`) -> relative error of each module, non-negative.
        names: the modules, for the description.
        noise: the error that the data type alone explains, drawn as a line.
    """
    # An exact zero has no place on a logarithmic axis, and nobody asks how far below the noise an error is.
    floor = (noise or 1e-6) / 1000
    styles = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", ":"), (RED, "D", "-."))
    with _axes(height=3.4) as (axes, finish):
        for (label, errors), (colour, marker, line) in zip(series.items(), styles, strict=False):
            values = [max(error, floor) for error in errors]
            axes.plot(
                range(len(values)), values, color=colour, marker=marker, linestyle=line, markersize=4, label=label
            )
        if noise:
            axes.axhline(noise, color=GREY, linestyle=(0, (6, 3)), linewidth=1.5, label=f"noise {noise:.1e}")
        axes.set_yscale("log")
        axes.set_xlabel("module, in forward order")
        axes.set_ylabel("relative error (log scale)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_above(axes)
    return Picture(finish.png, _describe_layers(series, names, noise))


def plot_margins(
    margins: Sequence[float],
    *,
    tolerance: float | None = None,
    near_ties: Sequence[int] = (),
    wrong: Sequence[int] = (),
) -> Picture:
    """How clearly the base model prefers each emitted token, along the text.

    Args:
        margins: the base's logit of the emitted token minus its best other logit; negative where the base prefers
            another token.
        tolerance: margins within plus or minus this are numerical noise.
        near_ties: positions that differ within the noise.
        wrong: positions that differ beyond it.
    """
    with _axes(height=3.4) as (axes, finish):
        axes.axhline(0, color=GREY, linewidth=1)
        if tolerance:
            axes.axhspan(-tolerance, tolerance, color=ORANGE, alpha=0.25, linewidth=0, label="within noise")
        axes.plot(range(len(margins)), margins, color=BLUE, marker=".", linewidth=0.8, markersize=5, label="agrees")
        for positions, colour, marker, label in ((near_ties, ORANGE, "s", "near-tie"), (wrong, RED, "X", "differs")):
            if positions:
                values = [margins[position] for position in positions]
                axes.plot(
                    positions,
                    values,
                    linestyle="",
                    marker=marker,
                    markersize=9,
                    color=colour,
                    markeredgecolor="black",
                    label=label,
                )
        axes.set_xlabel("position in the generated text (tokens)")
        axes.set_ylabel("margin (logits)")
        _legend_above(axes)
    smallest = f", smallest margin {min(margins):.3g}" if margins else ""
    counts = f"{len(wrong)} differ, {len(near_ties)} near-ties{smallest}"
    return Picture(finish.png, f"Margin of each of {len(margins)} generated tokens under the base model: {counts}")


class _Finished:
    png = b""


@contextmanager
def _axes(height: float) -> Iterator[tuple[Axes, _Finished]]:
    """One set of axes in the house style; `finish.png` holds the picture afterwards."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finish = _Finished()
    settings = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 9.5}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.grid(True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        yield axes, finish
        stream = io.BytesIO()
        figure.savefig(stream, format="png", metadata={"Software": None})
        finish.png = stream.getvalue()


def _legend_above(axes: Axes) -> None:
    """A legend over the axes, where it hides no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, frameon=False, columnspacing=1.1, handletextpad=0.5
    )


def _leaf_heights(tree: MedusaTree) -> list[float]:
    """A row for each leaf, in order of paths; a parent sits in the middle of its children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    heights = [0.0] * tree.num_nodes
    for row, path in enumerate(tree.leaf_paths):
        heights[path[-1]] = float(row)
    for node in reversed(range(tree.num_nodes)):  # nodes are ordered by depth, so children come before their parents
        if node in children:
            below = [heights[child] for child in children[node]]
            heights[node] = (min(below) + max(below)) / 2
    return heights


def _label_nodes(axes: Axes, tree: MedusaTree, heights: Sequence[float], tokens: Mapping[int, str]) -> None:
    """Ranks (or tokens) beside the nodes, while there is room for them."""
    if tree.num_nodes > LABELLED_NODES and not tokens:
        return
    for node, path in enumerate(tree.nodes):
        text = tokens.get(node) if tokens else (f"#{path[-1] + 1}" if path else None)
        if text:
            axes.annotate(
                text,
                (len(path), heights[node]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
                zorder=4,
            )


def _describe_layers(series: Mapping[str, Sequence[float]], names: Sequence[str], noise: float | None) -> str:
    parts = []
    for label, errors in series.items():
        if not errors:
            continue
        worst = max(range(len(errors)), key=lambda place: errors[place])
        name = f" at {names[worst]}" if worst < len(names) else ""
        parts.append(f"{label}: largest {errors[worst]:.1e}{name}")
    level = f"; noise of the data type {noise:.1e}" if noise else ""
    return "Relative error module by module. " + "; ".join(parts) + level
