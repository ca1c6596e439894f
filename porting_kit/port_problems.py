"""What is wrong with a port file, from pydantic's list of problems into this project's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from porting_kit.errors import PortFileError

EITHER_OR = {
    "tree": "a list of paths such as [[0], [0, 0]], a file that holds one, or a tree's name",
    "fit": "auto, off, or a list of transforms",
    "alignment.prompts": "a text file, or a list of texts",
}
"""What may stand in the fields that take more than one kind of value."""


def word_problem(error: ValidationError, where: object, suggest_name: Callable[[str], str | None]) -> PortFileError:
    """The first problem of a pydantic error in this project's words; the rest are counted.

    Args:
        error: of a port.
        where: the port file, for the message.
        suggest_name: the nearest field's dotted name, None when none is near.
    """
    problems = error.errors()
    first = next((item for item in problems if item["type"] == "extra_forbidden"), problems[0])
    dotted = ".".join(str(part) for part in first["loc"])
    either = next((name for name in EITHER_OR if dotted == name or dotted.startswith(f"{name}.")), None)
    if either:
        # One wrong value of such a field is one problem for each kind it might have been.
        problems = [item for item in problems if item is first or ".".join(map(str, item["loc"])).find(either) != 0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        near = suggest_name(dotted)
        if near == dotted:
            return PortFileError(
                f"port file names one field twice: {dotted!r} is a short form{more}",
                expected="each field once",
                found=f"{dotted} beside its long form",
                where=where,
                next_step="keep one of the two keys",
            )
        return PortFileError(
            f"port file has an unknown key {dotted!r}{more}",
            expected=f"did you mean {near!r}?" if near else "a key of the port file",
            found=repr(dotted),
            where=where,
            next_step="correct or remove the key",
        )
    if first["type"] == "missing":
        return PortFileError(
            f"port file lacks the key {dotted!r}{more}",
            expected=f"{dotted}: ...",
            found="no such key",
            where=where,
            next_step=f"add {dotted}: ...",
        )
    expected = EITHER_OR[either] if either else first["msg"].removeprefix("Value error, ")
    if first["type"] in {"model_type", "dict_type"}:
        expected = "a mapping of fields; leave the key out for the defaults"
    return PortFileError(
        f"port file has an unusable value for {either or dotted or 'the port'!r}{more}",
        expected=expected,
        found=repr(first.get("input"))[:120],
        where=where,
        next_step=f"put the value in quotes: {either or dotted}: '...'"
        if is_read_as_other(first)
        else "correct the value",
    )


def is_read_as_other(problem: Mapping[str, Any]) -> bool:
    """YAML made a number, a date or a mapping of what was meant as text: 0.11, or a word that ends in a colon."""
    return problem["type"] == "string_type" and not isinstance(problem.get("input"), (list, type(None)))
