"""Where a source tree comes from: its release, and the commit when it is a git checkout."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from porting_kit.source_tree import SourceTree


@dataclass(frozen=True)
class TreeOrigin:
    """What names a tree.

    Args:
        release, kind, spec_arguments: as `SourceTree` read them.
        commit: of the checkout; None when it is none.
        commit_date: of that commit, ISO 8601.
    """

    release: str
    kind: str
    spec_arguments: tuple[str, ...]
    commit: str | None = None
    commit_date: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {**asdict(self), "spec_arguments": list(self.spec_arguments)}


def read_origin(tree: SourceTree) -> TreeOrigin:
    """The origin of a tree. A folder inside another repository is no checkout of TensorRT-LLM."""
    origin = TreeOrigin(tree.release, tree.kind, tree.spec_arguments)
    top = _ask_git(tree.root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != tree.root.resolve():
        return origin
    head = _ask_git(tree.root, "show", "-s", "--format=%H %cI", "HEAD")
    commit, _, date = (head or "").partition(" ")
    return TreeOrigin(tree.release, tree.kind, tree.spec_arguments, commit or None, date or None)


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """git's answer, None when there is no git or it refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
