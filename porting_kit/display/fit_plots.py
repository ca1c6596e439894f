"""Plots of a kernel fit: the ALiBi line beside its waves, and attention with the line, without it, and fitted."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from porting_kit.display.plots import BLUE, GREEN, GREY, ORANGE, RED, WIDTH_INCHES, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 120
"""Fewer than elsewhere: these pictures are committed beside the pages."""
COLOURS_KEPT = 160
COLOURS = (BLUE, ORANGE, GREEN, RED)
STYLES = ("-", "--", "-.", ":")


def plot_alibi_line(
    distances: Sequence[int],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    floor: float,
    error_nats: float,
) -> Picture:
    """The bias of some heads over the distance to a key: the line above, what the waves give, and their difference.

    Args:
        distances: in tokens.
        lines: head -> (ALiBi, fitted waves), in nats, constants taken out.
        floor: in nats; below it keys are held down and not followed.
        error_nats: largest error above the floor.
    """
    alt = (
        f"ALiBi's bias and the rotary waves that stand for it, over {max(distances) + 1} tokens, {len(lines)} heads. "
        f"Above {floor:g} nats the two coincide (largest error {error_nats:.2g}); below, the waves only stay low."
    )
    figure = _make_figure(height=5.0)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)})
    for place, (head, (line, waves)) in enumerate(lines.items()):
        look = {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place % len(STYLES)]}
        line, waves = np.asarray(line), np.asarray(waves)
        top.plot(distances, line, color=GREY, linewidth=3, alpha=0.45)
        top.plot(distances, waves, linewidth=1.3, label=head, **look)
        near = line > floor
        bottom.plot(np.asarray(distances)[near], (waves - line)[near], linewidth=1, **look)
    top.axhline(floor, color=GREY, linewidth=0.8, linestyle=(0, (6, 3)))
    top.set_ylim(1.7 * floor, 2)
    top.set_ylabel("bias (nats)")
    top.legend(loc="center right", title="waves of head (grey: ALiBi)", fontsize=9, title_fontsize=9)
    bottom.set_ylabel("error (nats)")
    bottom.set_xlabel("distance to the key (tokens)")
    return _finish(figure, alt)


def plot_attention_change(
    distances: Sequence[int], weights: Mapping[str, Sequence[float]], *, variations: Mapping[str, float]
) -> Picture:
    """Attention over the distance to the key, averaged over queries.

    Args:
        distances: in tokens.
        weights: `exact`, `dropped`, `fitted` -> mean weight of the keys at each distance.
        variations: mean total variation to the exact distribution, of `dropped` and `fitted`.
    """
    told = ", ".join(f"{name} {value:.2g}" for name, value in variations.items())
    alt = (
        "Attention by distance to the key: exact ALiBi and the fit coincide, and without the bias far keys take over. "
        f"Total variation from the exact distribution: {told}."
    )
    figure = _make_figure(height=3.4)
    axes = figure.add_subplot()
    looks = {"exact": (GREY, "-", 3.5), "dropped": (RED, ":", 1.8), "fitted": (BLUE, "--", 1.5)}
    for name, (colour, style, width) in looks.items():
        axes.plot(distances, weights[name], color=colour, linestyle=style, linewidth=width, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("distance to the key (tokens)")
    axes.set_ylabel("mean attention weight")
    axes.legend(fontsize=9.5)
    return _finish(figure, alt)


def _make_figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Figure, alt: str) -> Picture:
    from PIL import Image  # matplotlib needs it as well

    for axes in figure.axes:
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # A palette of a few colours makes the committed picture three times smaller.
    Image.open(drawn).convert("RGB").quantize(COLOURS_KEPT).save(small, format="png", optimize=True)
    return Picture(small.getvalue(), alt)
