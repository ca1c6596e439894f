"""One offline page that lays two runs of the same port side by side."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:1rem}
section{border:1px solid #c8c8c8;border-radius:6px;padding:1rem;overflow-wrap:anywhere}
.fail{border-top:6px solid #b3261e}.pass{border-top:6px solid #1b6e3c}
dt{font-weight:600;margin-top:.4rem}dd{margin:0}
pre{white-space:pre-wrap;background:#f4f4f4;padding:.6rem;border-radius:4px;font-size:.85rem}
"""


class ComparedSide(Protocol):
    """What the page needs of one run."""

    title: str
    kernel: str
    folder: Path
    alignment: Any

    @property
    def verdict(self) -> str:
        """`pass`, `fail` ..."""

    @property
    def cause(self) -> str:
        """Named cause, empty for a pass."""


def render_comparison(sides: Sequence[ComparedSide], texts: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The page as HTML text.

    Args:
        sides: the runs, left to right; reports are linked relative to the first folder's parent.
        texts: (prompt, what each side said).
    """
    top = sides[0].folder.parent
    columns = "".join(_render_side(side, top) for side in sides)
    blocks = "".join(_render_text(prompt, said, sides) for prompt, said in texts)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>One port, two kernels</title><style>{STYLE}</style></head><body>"
        "<h1>One port, two kernels</h1>"
        "<p>The same checkpoint and the same patched model.py. Only the attention arithmetic of the generation phase "
        f"differs.</p><div class='sides'>{columns}</div><h2>What they said</h2>{blocks}</body></html>"
    )


def _render_side(side: ComparedSide, top: Path) -> str:
    found = side.alignment
    cause = found.get("cause") or {}
    entries = [
        ("verdict", side.verdict),
        ("kernel", side.kernel),
        ("wrong tokens", found.get("wrong_tokens")),
        ("tokens per step", f"{found.get('tokens_per_step') or 0:.2f}"),
    ]
    if side.cause:
        entries += [("cause", side.cause), ("fix", cause.get("fix"))]
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>" for name, value in entries)
    link = os.path.relpath(side.folder / "report.html", top)
    return (
        f"<section class='{'pass' if side.verdict == 'pass' else 'fail'}'><h2>{html.escape(side.title)}</h2>"
        f"<dl>{rows}</dl><p><a href='{html.escape(link)}'>the whole report</a></p></section>"
    )


def _render_text(prompt: str, said: Sequence[str], sides: Sequence[ComparedSide]) -> str:
    boxes = "".join(
        f"<section><strong>{html.escape(side.title)}</strong><pre>{html.escape(text)}</pre></section>"
        for side, text in zip(sides, said, strict=False)
    )
    return f"<h3>Prompt</h3><pre>{html.escape(prompt)}</pre><div class='sides'>{boxes}</div>"
