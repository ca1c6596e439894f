"""A checkpoint that is not what the rules make of its base: what was changed, and the known faults that change so.

Nothing is run: a fault of the list is recognised by the fields and values that it writes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortingKitError

LISTED = 2
"""Changes that one sentence lists; the evidence holds them all."""


@dataclass(frozen=True)
class Change:
    """One field of config.json, or one kind of tensor, that is not what the rules make of the base.

    Args:
        name: "config.json: FIELD", or a tensor's name with `*` for the number of the layer.
        expected, found: the value, or what is said of the values.
        fix: what to do.
        tensors: names of the tensors; none for a field.
    """

    name: str
    expected: str
    found: str
    fix: str
    tensors: tuple[str, ...] = ()

    def describe(self) -> str:
        """One clause."""
        where = f"{self.name} ({len(self.tensors)} tensors)" if len(self.tensors) > 1 else self.name
        return f"{where}: expected {self.expected}, found {self.found}"

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {name: getattr(self, name) for name in ("name", "expected", "found", "fix")} | {
            "tensors": list(self.tensors)
        }


def describe_changes(changes: Sequence[Change], known: Sequence[Fault] = ()) -> str:
    """One sentence: what was changed, and the names of the known faults that change it so."""
    listed = "; ".join(change.describe() for change in changes[:LISTED])
    more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    names = f" ({' and '.join(fault.title for fault in known)})" if known else ""
    return f"the checkpoint is not what the rules make of its base{names}: {listed}{more}"


def as_cause(changes: Sequence[Change], known: Sequence[Fault] = ()) -> dict[str, Any]:
    """The form in which an alignment states its cause."""
    return {
        "name": describe_changes(changes, known),
        "fault": " + ".join(fault.name for fault in known) or None,
        "kind": "checkpoint",
        "fix": "; ".join(dict.fromkeys([*(change.fix for change in changes), *(fault.fix for fault in known)])),
        "evidence": [change.describe() for change in changes],
        "changes": [change.as_dict() for change in changes],
        "ties": [],
    }


def find_known_faults(right: PortState, held: PortState, faults: Sequence[Fault] = CATALOGUE) -> tuple[Fault, ...]:
    """The faults whose every change of the right checkpoint is there in the one that is held, those with most first.

    Args:
        right: what the rules make; tensors that were not changed may be left out.
        held: config and tensors that are there, by the same names.
        faults: those to look for.
    """
    matches = []
    for fault in faults:
        for form in fault.forms:
            try:
                made = form(right)
            except (PortingKitError, RuntimeError, TypeError, ValueError, KeyError, IndexError):
                continue  # this checkpoint, or what of it was changed, cannot have the fault
            items = _list_changes(right, made)
            if items and all(_has(held, made, *item) for item in items):
                matches.append((items, fault))
    matches.sort(key=lambda match: -len(match[0]))
    named: list[Fault] = []
    covered: set[tuple[str, str]] = set()
    for items, fault in matches:
        if not items <= covered:
            covered |= items
            named.append(fault)
    return tuple(named)


def _list_changes(before: PortState, after: PortState) -> set[tuple[str, str]]:
    """(part, name) of every field and tensor that differs."""
    fields = {("config", name) for name in {*before.config, *after.config} if not _has(before, after, "config", name)}
    names = {*before.tensors, *after.tensors}
    return fields | {("tensors", name) for name in names if not _has(before, after, "tensors", name)}


def _has(one: PortState, other: PortState, part: str, name: str) -> bool:
    first, second = (getattr(state, part).get(name) for state in (one, other))
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or (first.shape == second.shape and torch.equal(first, second))
    return first == second
