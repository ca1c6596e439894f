"""Write the golden pairs anew and show what changed: `python -m tests.patching.regenerate`, then read the diff.

Only after.py and case.json are written; the text before and the era in case.json are the input.
"""

from __future__ import annotations

import difflib
import json
import sys

from tests.patching.golden_cases import FOLDER, NAMES, patch_case


def regenerate() -> int:
    """Rewrite every case; print a diff of each file that changed.

    Returns:
        The number of files that changed.
    """
    changed = 0
    for name in NAMES:
        outcome, said = patch_case(name)
        for file, text in (("after.py", outcome.source), ("case.json", json.dumps(said, indent=2) + "\n")):
            path = FOLDER / name / file
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            if old != text:
                changed += 1
                label = f"{name}/{file}"
                sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), text.splitlines(True), label, label))
                path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    print(f"{regenerate()} files changed", file=sys.stderr)
