"""What the structure tests look at: the repository's root and the files git tracks in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def tracked_files() -> tuple[str, ...]:
    """Paths of all tracked files that exist, relative to the root, with forward slashes."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: the tracked files cannot be listed")
    return tuple(name for name in listing.split("\0") if name and (ROOT / name).is_file())
