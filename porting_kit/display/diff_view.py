"""A unified diff for reading: split into hunks, lines marked by sign and tint."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TINTS = {"+": "0,158,115", "-": "213,94,0"}
_PRE = "margin:0;padding:.4em .6em;overflow-x:auto;line-height:1.35;font-size:.85em;background:rgba(128,128,128,.07);"


@dataclass(frozen=True)
class Hunk:
    """One hunk of a unified diff.

    Args:
        file: the path on the `+++` line, without the `b/`.
        header: the `@@` line.
        lines: the hunk's lines with their signs.
    """

    file: str
    header: str
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        """Lines added."""
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        """Lines removed."""
        return sum(line.startswith("-") for line in self.lines)

    @property
    def title(self) -> str:
        """Where it is and how large."""
        return f"{self.file}  {self.header.split('@@')[1].strip()}  +{self.added} -{self.removed}"

    def to_html(self) -> str:
        """HTML: the title and the tinted lines."""
        lines = "".join(_line_html(line) for line in self.lines)
        return f'<p style="margin:.6em 0 .2em;"><b>{html.escape(self.title)}</b></p><pre style="{_PRE}">{lines}</pre>'

    def __str__(self) -> str:
        return "\n".join((self.title, *self.lines))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


@dataclass(frozen=True)
class DiffView:
    """A whole diff. `open_hunks` are shown in full, the rest folded up behind their titles."""

    hunks: tuple[Hunk, ...]
    open_hunks: int = 4

    @property
    def summary(self) -> str:
        """Files, hunks and lines."""
        files = len({hunk.file for hunk in self.hunks})
        added, removed = sum(hunk.added for hunk in self.hunks), sum(hunk.removed for hunk in self.hunks)
        return f"{len(self.hunks)} hunks in {files} file{'s' * (files != 1)}, +{added} -{removed} lines"

    def to_html(self) -> str:
        """HTML of all hunks; long diffs fold without a script."""
        if not self.hunks:
            return "<p>No change was necessary.</p>"
        parts = [
            f'<p style="margin:.3em 0;">{self.summary}</p>',
            *(hunk.to_html() for hunk in self.hunks[: self.open_hunks]),
        ]
        parts += [
            f"<details><summary>{html.escape(hunk.title)}</summary>{hunk.to_html()}</details>"
            for hunk in self.hunks[self.open_hunks :]
        ]
        return "".join(parts)

    def __str__(self) -> str:
        return "\n".join((self.summary, *map(str, self.hunks))) if self.hunks else "No change was necessary."

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": str(self)}


def view_diff(diff: str, *, open_hunks: int = 4) -> DiffView:
    """Split a unified diff for display; an empty diff is a view without hunks."""
    return DiffView(split_hunks(diff.splitlines()), open_hunks)


def split_hunks(lines: Sequence[str]) -> tuple[Hunk, ...]:
    """The hunks of a unified diff, in order. Header lengths decide where a hunk ends, not the look of its lines."""
    hunks: list[Hunk] = []
    file, place = "", 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.startswith("+++ "):
            file = line[4:].split("\t")[0].removeprefix("b/")
        elif line.startswith("@@ "):
            old, new = (_length(part) for part in line.split("@@")[1].split()[:2])
            body = []
            while place < len(lines) and (old > 0 or new > 0 or lines[place].startswith("\\")):
                body.append(lines[place])
                old -= lines[place][:1] in (" ", "-", "")
                new -= lines[place][:1] in (" ", "+", "")
                place += 1
            hunks.append(Hunk(file, line, tuple(body)))
    return tuple(hunks)


def _length(part: str) -> int:
    """`-12,7` -> 7; `-12` -> 1."""
    return int(part.partition(",")[2] or 1)


def _line_html(line: str) -> str:
    tint = _TINTS.get(line[:1])
    style = f"background:rgba({tint},.2);" if tint else ""
    return f'<span style="display:inline-block;min-width:100%;{style}">{html.escape(line) or " "}</span>\n'
