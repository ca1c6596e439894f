"""The page of one diagnosis: the cause in one sentence, why, the fix, the evidence, and what else was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from porting_kit import __version__
from porting_kit.display.alignment_view import cause_view, layers_view, margins_plot
from porting_kit.display.diagnosis_plots import plot_hypotheses
from porting_kit.display.page import page_template
from porting_kit.display.tables import SIGNS, TINTS, Stack


def render_diagnosis(title: str, diagnosis: Mapping[str, Any], alignment: Mapping[str, Any] | None = None) -> str:
    """The page's HTML; it needs no network.

    Args:
        title: of the port.
        diagnosis: `diagnosis.Diagnosis.as_dict()`.
        alignment: `AlignmentResult.as_dict()` of the same tokens, None when there is none.
    """
    pictures: list[Any] = []
    if diagnosis["ranking"] and diagnosis["to_explain"]:
        pictures.append(plot_hypotheses(diagnosis["ranking"], diagnosis["to_explain"]))
    if alignment is not None and alignment["rows"]:
        pictures.append(margins_plot(alignment))
    if alignment is not None and alignment.get("layers"):
        pictures.append(layers_view(alignment))
    verdict = "pass" if diagnosis["healthy"] else "fail"
    return page_template("diagnosis.html.j2").render(
        title=f"Diagnosis of {title}",
        tint=TINTS[verdict],
        sign=SIGNS[verdict],
        verdict=diagnosis["verdict"],
        fix=diagnosis["fix"],
        cause=cause_view(diagnosis),
        pictures=Stack(tuple(pictures)),
        version=__version__,
    )
