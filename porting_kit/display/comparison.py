"""Two runs of one port beside each other on one page: verdicts, causes, texts, margins. Needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from porting_kit import __version__
from porting_kit.display import alignment_view
from porting_kit.display.page import page_template
from porting_kit.display.tables import Code, Folded, Link, Stack, Table, VerdictMark


def render_comparison(sides: Sequence[Any], texts: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The HTML of a page that lies beside the run folders.

    Args:
        sides: runs with `title`, `kernel`, `verdict`, `meant`, `cause`, `folder` and `alignment` (its
            `alignment.json`, or empty).
        texts: a prompt and what each side said.
    """
    return page_template("comparison.html.j2").render(
        title="The same model, three ports",
        overview=_overview(sides),
        texts=[(prompt, list(zip(sides, said, strict=False))) for prompt, said in texts],
        sides=[(side, _details(side.alignment)) for side in sides],
        version=__version__,
    )


def _overview(sides: Sequence[Any]) -> Table:
    """One column a side, one row a figure."""
    figures = [side.alignment for side in sides]
    rows = [
        ("kernel", *(Code(side.kernel) for side in sides)),
        ("verdict", *(_mark(side) for side in sides)),
        ("meant to", *(side.meant for side in sides)),
        ("wrong tokens", *(found.get("wrong_tokens") for found in figures)),
        ("near-ties", *(found.get("near_ties") for found in figures)),
        ("tokens per step", *(found.get("tokens_per_step") for found in figures)),
        ("cause", *(side.cause or None for side in sides)),
        ("fix", *((found.get("cause") or {}).get("fix") for found in figures)),
        ("report", *(Link(f"{side.folder.name}/report.html", "report.html") for side in sides)),
    ]
    return Table(("", *(side.title for side in sides)), rows)


def _mark(side: Any) -> VerdictMark:
    return alignment_view.alignment_mark(side.alignment) if side.alignment else VerdictMark(side.verdict)


def _details(alignment: Any) -> Stack:
    if not alignment:
        return Stack(())
    parts = (
        alignment_view.checks_table(alignment),
        alignment_view.divergence_facts(alignment),
        alignment_view.margins_plot(alignment),
        Folded("Acceptance", alignment_view.acceptance_view(alignment)),
        Folded("Cause", alignment_view.cause_view(alignment.get("cause"))),
    )
    return Stack(parts)
