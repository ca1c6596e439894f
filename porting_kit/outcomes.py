"""The words every step uses to say how it went: verdicts, what a verdict covered, one outcome per step.

This module does not know what the steps compute; it only fixes the vocabulary and the JSON shape.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class Verdict(str, enum.Enum):
    """How a step ended. `refused`: the release cannot do it; `not_run`: the machine lacks what it takes."""

    PASS = "pass"
    FAIL = "fail"
    REFUSED = "refused"
    NOT_RUN = "not_run"

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail and refused, 3 for not_run (2 is kept for unusable input)."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.REFUSED: 1, Verdict.NOT_RUN: 3}[self]


class Coverage(str, enum.Enum):
    """What a verdict can cover. Whatever is not listed in a verdict is printed as not covered."""

    WEIGHTS = "weights"
    MODEL_CODE = "model code"
    TREE_AND_ACCEPTANCE = "tree and acceptance"
    KERNEL_ARITHMETIC = "kernel arithmetic"
    ENGINE = "engine"


APPROXIMATE = "approximate fit"


def verdict_remark(verdict: str, approximate_fit: object) -> str:
    """What must be said with a verdict: a pass of an approximately fitted model is never just "pass"."""
    return APPROXIMATE if verdict == Verdict.PASS.value and approximate_fit else ""


def not_covered(covered: tuple[Coverage, ...]) -> tuple[Coverage, ...]:
    """The rest of the list, in its own order."""
    return tuple(item for item in Coverage if item not in covered)


@dataclass(frozen=True)
class StepOutcome:
    """What one step leaves behind in `outcome.json`.

    Args:
        step: the step's name (`preflight`, `patch`, `convert`, `build`, `align`, `report`).
        verdict: how it ended.
        summary: one sentence that a reader understands without the figures.
        covered: what the verdict covered.
        figures: numbers and short texts, JSON-serialisable.
        products: file names relative to the run folder.
        made: product -> what was known of it when the step finished, see `products`; only of what later steps rest on.
        inputs: name -> SHA-256 of everything the step read (see `run_folder`).
        seconds: wall time.
        failing_gate: the name of the gate that failed, None when none did.
    """

    step: str
    verdict: Verdict
    summary: str
    covered: tuple[Coverage, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    products: tuple[str, ...] = ()
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    failing_gate: str | None = None

    @property
    def said(self) -> str:
        """`verdict - summary`; a summary that begins with its verdict does not say it twice."""
        verdict = self.verdict.value
        return self.summary if self.summary.startswith(verdict) else f"{verdict} - {self.summary}"

    def changed_inputs(self, today: Mapping[str, str]) -> list[str]:
        """Names of what differs between what the step read and what it would read today; none when it still holds."""
        return sorted(name for name in {*self.inputs, *today} if self.inputs.get(name) != today.get(name))

    def says_the_same(self, other: StepOutcome) -> bool:
        """Whether a report may stand that shows the other one: only figures, free disk for one, and times differ."""
        names = ("step", "verdict", "summary", "covered", "products", "inputs", "failing_gate")
        same_files = [known.get("sha256") for known in self.made.values()] == [
            known.get("sha256") for known in other.made.values()
        ]
        return same_files and all(getattr(self, name) == getattr(other, name) for name in names)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; enums become their values."""
        document = asdict(self)
        document["verdict"] = self.verdict.value
        document["covered"] = [item.value for item in self.covered]
        document["not_covered"] = [item.value for item in not_covered(self.covered)]
        document["products"] = list(self.products)
        return document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> StepOutcome:
        """The inverse of `as_dict`."""
        fields = {key: value for key, value in document.items() if key != "not_covered"}
        fields["verdict"] = Verdict(fields["verdict"])
        fields["covered"] = tuple(Coverage(item) for item in fields["covered"])
        fields["products"] = tuple(fields["products"])
        fields["made"] = {name: dict(known) for name, known in fields.get("made", {}).items()}
        return cls(**fields)
