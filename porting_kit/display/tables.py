"""Tables that read well in a notebook, in static HTML, in Markdown and in a terminal.

A verdict is always a sign and a word, never a colour alone. Styles are inline, because neither an exported notebook
nor JupyterLab's sanitiser keeps a style sheet; colours are translucent, so that they fit dark pages too.
"""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SIGNS = {"pass": "✓", "fail": "✗", "refused": "✗", "silent": "!", "mended": "↻", "not_run": "–", "failed": "✗"}
WORDS = {"not_run": "not run"}
TINTS = {  # Okabe-Ito: distinguishable with any colour vision
    "pass": "0,158,115",
    "mended": "0,114,178",
    "silent": "230,159,0",
    "not_run": "128,128,128",
    "fail": "213,94,0",
    "failed": "213,94,0",
    "refused": "213,94,0",
}
TERMINAL_COLUMNS = 120
SHORT_TEXT = 12
LONG_TEXT = 40
LONG_NAME = 64
_CELL = "padding:.3em .7em;text-align:left;vertical-align:top;border-bottom:1px solid rgba(128,128,128,.3);"


@dataclass(frozen=True)
class VerdictMark:
    """A verdict in a table cell: shown as sign and word on a tint.

    Args:
        value: a verdict, or the verdict of a gate.
        remark: what must be said with it, such as `approximate fit`.
    """

    value: str
    remark: str = ""

    @property
    def word(self) -> str:
        """The verdict in words, never without its remark."""
        return ", ".join(filter(None, (WORDS.get(self.value, self.value), self.remark)))

    def __str__(self) -> str:
        return f"{SIGNS.get(self.value, '?')} {self.word}"

    def to_html(self) -> str:
        """The same as HTML."""
        tint = TINTS.get(self.value, "128,128,128")
        style = f"background:rgba({tint},.22);border-radius:.3em;padding:.1em .5em;white-space:nowrap;"
        return f'<span style="{style}">{html.escape(str(self))}</span>'


@dataclass(frozen=True)
class Code:
    """A literal in a table cell or on its own: a file, a name, a command."""

    value: str

    def __str__(self) -> str:
        return self.value

    def to_html(self) -> str:
        """The same as HTML."""
        is_name = len(self.value) <= LONG_NAME and " " not in self.value
        wrap = "white-space:nowrap;" if is_name else "overflow-wrap:anywhere;"
        return f'<code style="{wrap}">{html.escape(self.value)}</code>'


@dataclass(frozen=True)
class Link:
    """A link to a file beside the page."""

    target: str
    text: str

    def __str__(self) -> str:
        return self.target

    def to_html(self) -> str:
        """The same as HTML."""
        return f'<a href="{html.escape(self.target, quote=True)}">{html.escape(self.text)}</a>'


@dataclass(frozen=True)
class Preformatted:
    """Text whose lines matter: a command, a message."""

    text: str
    title: str = ""

    def to_html(self) -> str:
        """HTML that wraps nothing and scrolls in its own box."""
        head = f'<p style="font-weight:600;margin:.3em 0;">{html.escape(self.title)}</p>' if self.title else ""
        style = "overflow-x:auto;padding:.5em .7em;margin:.3em 0;font-size:.85em;background:rgba(128,128,128,.1);"
        return f'{head}<pre style="{style}">{html.escape(self.text)}</pre>'

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.title, self.text)))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Args:
        columns: column headings.
        rows: one sequence of cells a row; cells may be `VerdictMark`, `Code`, numbers, texts or None.
        title: a caption, shown above.
        note: a sentence below.
        limit: rows shown; the rest is counted. None shows all.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    note: str = ""
    limit: int | None = None

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"table {self.title!r}: a row has {len(wrong[0])} cells for {len(self.columns)} columns")

    @property
    def shown(self) -> Sequence[Sequence[Any]]:
        """The rows within the limit."""
        return self.rows if self.limit is None else self.rows[: self.limit]

    @property
    def remark(self) -> str:
        """The note and the count of what the limit hides."""
        hidden = len(self.rows) - len(self.shown)
        more = f"{hidden} more of {len(self.rows)} rows not shown." if hidden else ""
        return " ".join(part for part in (self.note, more) if part)

    @property
    def sentence(self) -> str:
        """What stands for a table without rows."""
        return ": ".join(filter(None, (self.title, self.remark or "none")))

    def to_html(self) -> str:
        """HTML that scrolls sideways inside its own box when it is wider than the page."""
        head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(column)}</th>' for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f'<td style="{_cell_style(cell)}">{_cell_html(cell)}</td>' for cell in row) + "</tr>"
            for row in self.shown
        )
        caption = (
            f'<caption style="text-align:left;font-weight:600;padding:.3em 0;">{html.escape(self.title)}</caption>'
            if self.title
            else ""
        )
        note = f'<p style="margin:.3em 0;opacity:.8;">{html.escape(self.remark)}</p>' if self.remark else ""
        if not self.rows:
            return f'<p style="margin:.3em 0;">{html.escape(self.sentence)}</p>'
        return (
            f'<div style="overflow-x:auto;margin:.5em 0;"><table style="border-collapse:collapse;margin:0;">{caption}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
        )

    def to_markdown(self) -> str:
        """A pipe table."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("| " + " | ".join("---" for _ in self.columns) + " |")
        lines += ["| " + " | ".join(_cell_text(cell).replace("|", "\\|") for cell in row) + " |" for row in self.shown]
        return "\n".join([*lines, "", self.remark] if self.remark else lines)

    def __str__(self) -> str:
        if not self.rows:
            return self.sentence
        return format_plain(self.title, self.columns, self.shown, self.remark)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


@dataclass(frozen=True)
class Facts:
    """A short list of name and value, for what has no columns."""

    pairs: Sequence[tuple[str, Any]]
    title: str = ""
    note: str = ""

    def to_html(self) -> str:
        """HTML: a table of two columns without a heading."""
        head = f'<p style="font-weight:600;margin:.3em 0;">{html.escape(self.title)}</p>' if self.title else ""
        rows = "".join(
            f'<tr><th scope="row" style="{_CELL}font-weight:400;opacity:.8;">{html.escape(name)}</th>'
            f'<td style="{_CELL}">{_cell_html(value)}</td></tr>'
            for name, value in self.pairs
        )
        note = f'<p style="margin:.3em 0;opacity:.8;">{html.escape(self.note)}</p>' if self.note else ""
        table = f'<table style="border-collapse:collapse;margin:0;"><tbody>{rows}</tbody></table>'
        return f'{head}<div style="overflow-x:auto;margin:.5em 0;">{table}</div>{note}'

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.pairs), default=0)
        lines = [self.title] if self.title else []
        lines += [f"{name:<{width}}  {_cell_text(value)}" for name, value in self.pairs]
        return "\n".join([*lines, self.note] if self.note else lines)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


@dataclass(frozen=True)
class Folded:
    """Something behind its title: opened with a click or a key, without a script. In text it is always open."""

    title: str
    part: Any

    def to_html(self) -> str:
        """HTML of the closed fold."""
        return f"<details><summary>{html.escape(self.title)}</summary>{self.part.to_html()}</details>"

    def __str__(self) -> str:
        return f"{self.title}\n{self.part}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


@dataclass(frozen=True)
class Stack:
    """Several of these objects, one below the other, as one result of a cell."""

    parts: Sequence[Any] = field(default_factory=tuple)

    def to_html(self) -> str:
        """HTML of the parts."""
        return "".join(part.to_html() for part in self.parts)

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in self.parts)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


def format_plain(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], remark: str = "") -> str:
    """A table for a terminal; the widest columns wrap so that a line fits."""
    texts = [[_cell_text(cell) for cell in row] for row in rows]
    widths = [max([len(column), *(len(row[place]) for row in texts)]) for place, column in enumerate(columns)]
    room = shutil.get_terminal_size((TERMINAL_COLUMNS, 24)).columns - 2 * (len(columns) - 1)
    while sum(widths) > max(room, 12 * len(columns)):
        widths[widths.index(max(widths))] -= 1
    lines = [title] if title else []
    for row in [list(columns), ["-" * width for width in widths], *texts]:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for part in range(max(map(len, cells))):
            padded = [
                (cell[part] if part < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, remark] if remark else lines)


def _cell_text(cell: Any) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, (list, tuple)):
        return ", ".join(_cell_text(item) for item in cell) or "none"
    return str(cell)


def _cell_style(cell: Any) -> str:
    """Long texts keep a width that can be read; the table scrolls sideways when there is no room."""
    length = len(_cell_text(cell))
    if length > LONG_TEXT:
        return f"{_CELL}min-width:13em;"
    return f"{_CELL}white-space:nowrap;" if length <= SHORT_TEXT else _CELL


def _cell_html(cell: Any) -> str:
    return cell.to_html() if hasattr(cell, "to_html") else html.escape(_cell_text(cell))
