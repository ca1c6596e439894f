"""The golden pairs: a folder each under golden/, with the text before and after the patch and what was said of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from porting_kit.patching import PatchOutcome, patch_model_source

FOLDER = Path(__file__).parent / "golden"
NAMES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/before.py")))


def patch_case(name: str) -> tuple[PatchOutcome, dict]:
    """Patch one case.

    Returns:
        The outcome, and the content that case.json must have.
    """
    expected = read_case(name)
    before = (FOLDER / name / "before.py").read_text(encoding="utf-8")
    outcome = patch_model_source(before, spec_arguments=tuple(expected["spec_arguments"]), file=f"{name}/before.py")
    said = {key: value for key, value in asdict(outcome).items() if key not in ("source", "edits")}
    said["edits"] = [str(edit) for edit in outcome.edits]
    return outcome, json.loads(json.dumps({"spec_arguments": expected["spec_arguments"], **said}))


def read_case(name: str) -> dict:
    """The content of case.json: the era, and what the patcher is to say."""
    return json.loads((FOLDER / name / "case.json").read_text(encoding="utf-8"))
