"""A unified diff that `git apply` takes, forwards and in reverse."""

from __future__ import annotations

import difflib
import re

NO_NEWLINE = "\n\\ No newline at end of file\n"


def unified_diff(path: str, before: str | None, after: str) -> str:
    """The diff of one file.

    Args:
        path: its path relative to the tree's root, with forward slashes.
        before: the text before; None for a new file.
        after: the text after.

    Returns:
        The diff; empty when nothing changed.
    """
    old, new = ([] if text is None else _split_lines(text) for text in (before, after))
    from_file = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(old, new, from_file, f"b/{path}")
    body = "".join(line if line.endswith("\n") else line + NO_NEWLINE for line in lines)
    if not body:
        return ""
    created = "new file mode 100644\n" if before is None else ""
    return f"diff --git a/{path} b/{path}\n{created}{body}"


def _split_lines(text: str) -> list[str]:
    """Lines with their endings. Only a line feed ends a line; str.splitlines also breaks at form feeds and more."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
