"""The order of TensorRT-LLM's release numbers. What a release can do is said elsewhere, next to the facts."""

from __future__ import annotations

import re


def release_key(release: str) -> tuple[int, int, int, int, int] | None:
    """A sortable form of `0.11.0.dev2024062500` or `1.0.0rc2`; None for other texts. dev < rc < final."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(dev|rc)(\d+))?(?:\.post\d+)?", release)
    if match is None:
        return None
    major, minor, patch, stage, number = match.groups()
    return int(major), int(minor), int(patch or 0), {"dev": 0, "rc": 1, None: 2}[stage], int(number or 0)
