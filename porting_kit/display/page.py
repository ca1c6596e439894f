"""The report as one HTML page: no script, no address to load anything from, readable on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from porting_kit import __version__
from porting_kit.display.results import outcome_mark
from porting_kit.display.sections import find_cause, find_fix, report_sections
from porting_kit.display.tables import SIGNS, TINTS
from porting_kit.outcomes import StepOutcome, not_covered

if TYPE_CHECKING:
    from porting_kit.steps.context import PortRun


def render_report(run: PortRun, outcomes: Mapping[str, StepOutcome], combined: StepOutcome) -> str:
    """The page's HTML.

    Args:
        run: the port and its run folder; products are read from there.
        outcomes: step -> outcome, for the steps that have finished.
        combined: the run's own outcome, which heads the page.
    """
    verdict = combined.verdict.value
    mark = outcome_mark(combined)
    return page_template("report.html.j2").render(
        port_name=run.port.name,
        verdict_sign=SIGNS[verdict],
        verdict_word=mark.word,
        tint=TINTS[verdict],
        summary=combined.summary,
        failing_gate=combined.failing_gate,
        cause=find_cause(outcomes),
        fix=find_fix(outcomes),
        covered=", ".join(item.value for item in combined.covered),
        not_covered=", ".join(item.value for item in not_covered(combined.covered)),
        sections=report_sections(run, outcomes),
        version=__version__,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


@cache
def page_template(name: str) -> Any:
    """A template of this package; every value is escaped unless it comes from a `to_html`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("porting_kit.display", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
