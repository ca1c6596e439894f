"""Insert keyword arguments into a text and leave every other character as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .structure import Arguments

# Upstream formats with yapf at 80 columns; a longer line is broken after the comma.
LINE_LENGTH = 80


@dataclass(frozen=True)
class Edit:
    """One edit: where it is in the original text, and the arguments it adds.

    Args:
        class_name, method: where it happens.
        line: the line of the signature or call.
        site: "signature" or the callee ("self.attention").
        added: the arguments as written ("spec_decoding_params=None").
    """

    class_name: str
    method: str
    line: int
    site: str
    added: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}, {self.class_name}.{self.method}, {self.site}: + {', '.join(self.added)}"


@dataclass(frozen=True)
class Insertion:
    """A text to be put in at an offset."""

    offset: int
    text: str


def insert_arguments(
    source: str, arguments: Arguments, added: tuple[str, ...], newline: str, *, before_starred: bool = False
) -> list[Insertion]:
    """The insertions that append arguments to a signature or call, in the layout the list already has.

    Args:
        source: the whole text.
        arguments: where the list is.
        added: the arguments to append.
        newline: the text's line ending.
        before_starred: whether a `**` parameter follows, which must stay last.
    """
    if arguments.first is None:
        return [Insertion(arguments.last, ", ".join(added) + (", " if before_starred else ""))]
    line_start = max(source.rfind("\n", 0, arguments.last), source.rfind("\r", 0, arguments.last)) + 1
    length = arguments.last - line_start + sum(len(each) + 2 for each in added)
    if not arguments.one_per_line and length < LINE_LENGTH:
        return [Insertion(arguments.last, "".join(f", {each}" for each in added))]
    indent = newline + " " * arguments.column
    comment = re.compile(r"[ \t]*#[^\r\n]*").match(source, arguments.end)
    if comment is None:
        return [Insertion(arguments.last, "".join(f",{indent}{each}" for each in added))]
    # The comment belongs to the argument before it and stays on its line.
    lines = "".join(f"{indent}{each}," for each in added)
    if arguments.has_comma:
        return [Insertion(comment.end(), lines)]
    return [Insertion(arguments.last, ","), Insertion(comment.end(), lines.removesuffix(","))]


def apply_insertions(source: str, insertions: Iterable[Insertion]) -> str:
    """The text with all insertions made; those at one offset in the order given."""
    pieces, at = [], 0
    for insertion in sorted(insertions, key=lambda each: each.offset):
        pieces += [source[at : insertion.offset], insertion.text]
        at = insertion.offset
    return "".join([*pieces, source[at:]])
