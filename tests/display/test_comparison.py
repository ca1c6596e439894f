"""Two runs beside each other: verdicts, causes and texts, with links to both reports and nothing from elsewhere."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from porting_kit.display.comparison import render_comparison


@dataclass
class Side:
    title: str
    kernel: str
    verdict: str
    cause: str
    folder: Path
    alignment: dict = field(default_factory=dict)
    meant: str = "pass as meant"


def make_alignment(verdict: str, wrong: int) -> dict:
    """The keys of `alignment.json` that the page reads."""
    return {
        "verdict": verdict,
        "wrong_tokens": wrong,
        "near_ties": 0,
        "tokens_per_step": 2.5,
        "cause": {"verdict": "ALiBi is dropped", "fix": "fit: [fold_alibi]"} if wrong else None,
        "gates": [{"name": "tokens", "passed": not wrong, "detail": f"{wrong} wrong"}],
        "first_divergence": None,
        "noise": {"near_tie_tolerance": 0.1},
        "accepted_by_depth": [0.5],
        "heads": {"agreement": [0.5], "predicted_tokens_per_step": 2.5},
        "rows": [{"prompt": 0, "margins": [1.0, -2.0], "near_ties": [], "wrong": [1] if wrong else []}],
    }


def test_both_sides_are_on_the_page():
    sides = [
        Side("on the release", "release:0.11", "fail", "ALiBi is dropped", Path("r/one"), make_alignment("fail", 3)),
        Side("exact", "exact", "pass", "", Path("r/two"), make_alignment("pass", 0)),
    ]
    page = render_comparison(sides, [("A prompt <x>", ["wrong words", "right words"])])
    for text in (
        "✗ fail",
        "✓ pass",
        "ALiBi is dropped",
        "fit: [fold_alibi]",
        "wrong words",
        "right words",
        "3 wrong",
        "pass as meant",
    ):
        assert text in page
    assert "A prompt &lt;x&gt;" in page
    assert 'href="one/report.html"' in page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [address for address in addresses if address.startswith(("http", "//"))] == []
    assert "<script" not in page


def test_a_side_without_an_alignment_is_shown_too():
    sides = [Side("a", "exact", "not_run", "", Path("a")), Side("b", "exact", "pass", "", Path("b"))]
    assert "– not run" in render_comparison(sides, [])
