"""Measured figures as JSON: four significant digits, one row a line, so that a change shows as a few changed lines."""

from __future__ import annotations

import json
from typing import Any


def write_figures(document: dict[str, Any]) -> str:
    """The document as JSON text."""
    parts = [f"{json.dumps(name)}: {_write(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(parts) + "\n}"


def _write(value: Any) -> str:
    value = round_figures(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


def round_figures(value: Any) -> Any:
    """Every float in a document rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: round_figures(each) for name, each in value.items()}
    return [round_figures(each) for each in value] if isinstance(value, (list, tuple)) else value
