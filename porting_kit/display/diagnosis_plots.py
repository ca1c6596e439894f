"""Pictures of a diagnosis: what each hypothesis explains, and where in the layers the port leaves its base."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from porting_kit.display.plots import BLUE, GREY, Picture, _axes

SHOWN = 8
LAYERS = "layers"


def plot_hypotheses(ranking: Sequence[Mapping[str, Any]], to_explain: int) -> Picture:
    """How many of the unexplained tokens each hypothesis explains, best first.

    Args:
        ranking: rows of `diagnosis.Diagnosis.as_dict()["ranking"]`.
        to_explain: tokens, steps and ends that the healthy port does not explain.
    """
    rows = [row for row in ranking if not row["error"] and row["name"] != "no fault"][:SHOWN]
    names = [row["name"].replace("_", " ") for row in rows]
    with _axes(height=0.9 + 0.36 * len(rows)) as (axes, finish):
        places = range(len(rows))
        axes.barh(places, [row["explained"] for row in rows], color=[BLUE if not place else GREY for place in places])
        axes.set_yticks(list(places), names)
        axes.invert_yaxis()
        axes.set_xlim(0, max(to_explain, 1))
        axes.set_xlabel(f"explained, of {to_explain} tokens, steps and ends")
        axes.grid(True, axis="x", alpha=0.3)
        axes.grid(False, axis="y")
    listed = ", ".join(f"{name} {row['explained']}" for name, row in zip(names, rows, strict=True))
    return Picture(finish.png, f"What each hypothesis explains of {to_explain} tokens, steps and ends: {listed}")


def plot_layer_map(errors: Sequence[Mapping[str, Any]], bound: float) -> Picture | None:
    """Error of each sub-module (rows) in each layer (columns), in multiples of the noise; None without layers.

    Args:
        errors: rows of a layer report, `module`, `phase` and `relative_error` each.
        bound: relative errors up to this are noise.
    """
    cells: dict[tuple[str, int], float] = {}
    for error in errors:
        place = split_layer(error["module"])
        if place is not None:
            name, layer = place
            key = (f"{name}, {error['phase']}", layer)
            cells[key] = max(cells.get(key, 0.0), error["relative_error"])
    if not cells:
        return None
    names = sorted({name for name, _ in cells}, key=lambda name: (name.rpartition(", ")[2], _place_of(name, errors)))
    layers = sorted({layer for _, layer in cells})
    shades = [[_shade(cells.get((name, layer)), bound) for layer in layers] for name in names]
    with _axes(height=1.1 + 0.3 * len(names)) as (axes, finish):
        image = axes.imshow(shades, aspect="auto", cmap="cividis", vmin=-2, vmax=4, interpolation="nearest")
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks(range(0, len(layers), max(1, len(layers) // 12)))
        axes.set_xlabel("layer")
        axes.grid(False)
        bar = axes.figure.colorbar(image, ax=axes, ticks=[-2, 0, 2, 4])
        bar.ax.set_yticklabels(["1/100", "noise", "100 ×", "10,000 ×"])
    worst = max(cells, key=cells.__getitem__)
    return Picture(
        finish.png,
        f"Relative error by sub-module and layer, in multiples of the noise {bound:.1e}: largest {cells[worst]:.1e} at "
        f"{worst[0]}, layer {worst[1]}",
    )


def split_layer(module: str) -> tuple[str, int] | None:
    """`transformer.layers.3.mlp.fc` to (`mlp.fc`, 3); None for a module outside the layers."""
    parts = module.split(".")
    if LAYERS not in parts[:-1] or not parts[parts.index(LAYERS) + 1].isdigit():
        return None
    at = parts.index(LAYERS) + 1
    return ".".join(parts[at + 1 :]), int(parts[at])


def _place_of(name: str, errors: Sequence[Mapping[str, Any]]) -> int:
    """Where a sub-module first comes in the forward pass."""
    kind = name.rpartition(", ")[0]
    return next(place for place, error in enumerate(errors) if (split_layer(error["module"]) or ("",))[0] == kind)


def _shade(error: float | None, bound: float) -> float:
    """Powers of ten above the noise; what was not compared is not drawn."""
    if error is None:
        return math.nan
    return min(math.log10(max(error, bound * 1e-3) / bound), 6.0) if math.isfinite(error) else 6.0
