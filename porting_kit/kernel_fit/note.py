"""What one transform did, in words and figures; plain data for the checkpoint's config and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitNote:
    """One transform's account.

    Args:
        transform: its name.
        exact: True when the fitted model computes the same function up to rounding of weights.
        what: one sentence.
        figures: measured figures; names carry units.
    """

    transform: str
    exact: bool
    what: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.transform}: {self.what} ({'exact' if self.exact else 'approximate'})"

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {**vars(self), "figures": dict(self.figures)}
