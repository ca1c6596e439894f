"""How `medusa_choices` are spelt, and what makes a list of paths readable. No torch.

Spellings: a list of paths; its text, as run.py's `--medusa_choices` takes it; the name of a tree; `chain:H`;
`cartesian:k1,k2,...`; a file that holds such a list as JSON or as a Python literal, alone, under the key
`medusa_choices`, or assigned to a name (with a type or without) as in the original project's medusa_choices.py.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from porting_kit.errors import TreeError, format_count, format_items, suggest_nearest
from porting_kit.medusa.named_trees import NAMED_CHOICES, TreePath, cartesian_choices, chain_choices

FILE_KEY = "medusa_choices"
MAX_DRAFT_NODES = 63
"""The root and 63 drafts fill two mask words, the most the kernels were built for (64 tokens per request and step)."""

TRIMMED_NODES = 4096
"""A combination up to this size is made, to be refused with the part of it that fits (see `tree_limits`)."""

THE_TEXT = "the tree's text"


def read_choices(spec: object) -> tuple[list[TreePath], str | None]:
    """Read any spelling.

    Args:
        spec: a list of paths, or a string or Path in one of the spellings of the module docstring.

    Returns:
        The paths as they were listed, not expanded, and the name they were asked for by (None for a plain list).

    Raises:
        TreeError: an unknown name, a missing or unreadable file, text that is no list, or an unusable list.
    """
    if not isinstance(spec, str | Path):
        return check_paths(spec), None
    text = str(spec).strip()
    if text.startswith(("[", "(")):
        return check_paths(_parse_literal(text, where=THE_TEXT), where=THE_TEXT), None
    if text in NAMED_CHOICES:
        return list(NAMED_CHOICES[text]), text
    kind, _, numbers = text.partition(":")
    if kind in ("chain", "cartesian") and numbers:
        counts = _parse_counts(text, numbers)
        return list(cartesian_choices(counts) if kind == "cartesian" else chain_choices(counts[0])), text
    path = Path(text).expanduser()
    if not path.is_file():
        nearest = suggest_nearest(text, NAMED_CHOICES)
        raise TreeError(
            f"No tree has the name {text!r}, and there is no such file",
            expected=f"{format_items(NAMED_CHOICES)}, chain:H, cartesian:k1,k2,..., a file, or a list of paths",
            found=text,
            next_step=f"Did you mean {nearest!r}?" if nearest else "Name an existing tree or file.",
        )
    return check_paths(_read_file(path), where=path), path.name


def check_paths(choices: Iterable[Sequence[int]], *, where: object = "the list of paths") -> list[TreePath]:
    """Plain tuples of non-negative integers, or a TreeError that says what each wrong entry is, and where."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise TreeError(
            "The tree is no list of paths",
            expected="a list such as [[0], [1], [0, 0]]",
            found=repr(choices),
            where=where,
            next_step="Write a list of paths there.",
        )
    entries = list(choices)
    if not entries:
        raise TreeError(
            "The tree is empty",
            expected="at least one path",
            found="[]",
            where=where,
            next_step="Use the tree 'small_2' to start.",
        )
    if all(type(entry) is int for entry in entries):
        raise _flat_form_error(entries, where)
    wrong = [f"entry {i}: {entry!r}" for i, entry in enumerate(entries) if not _is_path(entry)]
    if wrong:
        raise TreeError(
            "The tree has entries that are no path",
            expected="non-empty lists of non-negative integers; the root is implied",
            found=f"{len(wrong)} others",
            where=where,
            items=wrong,
            next_step="Correct those entries: rank 0 is a head's best token.",
        )
    paths = [tuple(entry) for entry in entries]
    repeated = [list(path) for path, count in Counter(paths).items() if count > 1]
    if repeated:
        raise TreeError(
            "The tree lists a path more than once",
            expected="each path once",
            found=f"{len(repeated)} repeated",
            where=where,
            items=repeated,
            next_step="Remove the repetitions: a runtime would count them as draft nodes.",
        )
    return paths


def _is_path(entry: object) -> bool:
    is_sequence = isinstance(entry, list | tuple) and len(entry) > 0
    return is_sequence and all(type(rank) is int and rank >= 0 for rank in entry)


def _flat_form_error(numbers: list[int], where: object) -> TreeError:
    """Early Medusa releases wrote [1, 7, 6]: all combinations of 1 base token, 7 of head 1, 6 of head 2."""
    advice = "List the paths one by one: [[0], [1], [0, 0], ...]."
    counts = tuple(numbers[1:])
    if numbers[0] == 1 and counts and min(counts) > 0:
        size = _cartesian_size(counts)
        advice = f"For the same tree write cartesian:{','.join(map(str, counts))} ({format_count(size, 'draft node')})"
        advice += ", or list its paths one by one." if size <= MAX_DRAFT_NODES else f"; {MAX_DRAFT_NODES} is the most."
    return TreeError(
        f"The tree {numbers} is in the flat form of early Medusa releases",
        expected="a list of paths such as [[0], [0, 0]], a file that holds one, or a tree's name",
        found=f"a flat list of {len(numbers)} numbers: how many candidates of the base and of each head are combined",
        where=where,
        next_step=advice,
    )


def _cartesian_size(counts: Sequence[int]) -> int:
    size, total = 1, 0
    for count in counts:
        size *= count
        total += size
    return total


def _parse_counts(text: str, numbers: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        counts = ()
    wanted = 1 if text.startswith("chain") else len(counts)
    if not counts or len(counts) != wanted or min(counts) < 1:
        raise TreeError(
            "The tree's numbers cannot be read",
            expected="chain:H or cartesian:k1,k2,... with positive whole numbers",
            found=text,
            next_step="Correct the numbers.",
        )
    size = _cartesian_size(counts)
    if size > (MAX_DRAFT_NODES if text.startswith("chain") else TRIMMED_NODES):
        raise TreeError(
            f"The tree {text} is larger than any engine takes",
            expected=f"at most {MAX_DRAFT_NODES} draft nodes, and no more levels than there are heads",
            found=f"{size} draft nodes",
            next_step="Write smaller numbers.",
        )
    return counts


def _read_file(path: Path) -> object:
    """The list in a tree file; the three forms of the module docstring."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors put a byte order mark first
        value = _parse_file(text, path)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise TreeError(
            "The tree file is neither JSON nor a Python literal",
            expected="a list of paths such as [[0], [1], [0, 0]]",
            found=error,
            where=path,
            next_step="Correct the file, or write the tree into the port file.",
        ) from error
    if not isinstance(value, dict):
        return value
    if FILE_KEY not in value:
        raise TreeError(
            f"The tree file has no key {FILE_KEY!r}",
            expected=f'{{"{FILE_KEY}": [[0], [1], [0, 0]]}}, or the list alone',
            found=f"the keys {format_items(map(repr, value))}" if value else "no key",
            where=path,
            next_step=f"Name the list {FILE_KEY}, or let the file hold the list alone.",
        )
    return value[FILE_KEY]


def _parse_file(text: str, path: Path) -> object:
    with suppress(ValueError):
        return json.loads(text)
    assigned = dict(item for node in ast.parse(text).body for item in _list_assigned(node))
    if len(assigned) > 1:
        raise TreeError(
            "The tree file defines more than one tree",
            expected="one list",
            where=path,
            items=assigned,
            next_step="Copy the wanted list into a file of its own.",
        )
    return _parse_literal(ast.unparse(*assigned.values()) if assigned else text, where=path)


def _list_assigned(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    """The name and the value of `name = value` or `name: type = value`; nothing of any other statement."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_plain = len(targets) == 1 and isinstance(targets[0], ast.Name) and node.value is not None
    return [(targets[0].id, node.value)] if is_plain else []


def _parse_literal(text: str, *, where: object) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise TreeError(
            "The tree's text is no list of paths",
            expected='text such as "[[0], [1], [0, 0]]"',
            found=text if len(text) <= 80 else f"{text[:77]}...",
            where=where,
            next_step="Correct the text.",
        ) from error
