"""Steps that rest on others: a missing one is run; a stale one, or one whose products were edited, is refused."""

from __future__ import annotations

import json
import sys
from typing import Any

from porting_kit.errors import CheckpointError, PatchError, RunFolderError
from porting_kit.outcomes import Verdict
from porting_kit.steps.context import PortRun
from porting_kit.whole_files import explain_problem, read_json


def require_steps(run: PortRun, *steps: str, edited: bool = False) -> tuple[str, ...]:
    """Make sure that earlier steps have finished in this run folder from the inputs of today, and made what is there.

    A step that never ran is run now, and said on stderr. One whose inputs changed since is refused: whoever changed
    them must decide to run it again. So is one whose products were edited, unless they are to be judged as they are.

    Args:
        edited: take edited products; for steps that judge them.

    Returns:
        What was edited, one clause a file; see `products` for what is seen.

    Raises:
        RunFolderError: a stale result, or an edited one.
        PatchError: the model cannot be patched.
    """
    found: tuple[str, ...] = ()
    for step in steps:
        if run.folder.outcome(step) is None:
            print(f"{step}: not run in {run.folder.root.name} yet, running it now", file=sys.stderr)
            _run_step(run, step)
        outcome = run.folder.require(step, run.inputs(step))
        if outcome.verdict is not Verdict.PASS:
            raise PatchError(
                f"step {step!r} did not pass, so nothing can rest on it",
                expected="pass",
                found=outcome.summary,
                where=run.folder.step(step),
                next_step=outcome.figures.get("next_step") or f"mend what it found, and rerun `porting-kit {step}`",
            )
        edits = run.folder.find_edits(outcome)
        if edits and not edited:
            raise RunFolderError(
                f"what step {step!r} made was edited since",
                expected=f"the files as `porting-kit {step}` wrote them",
                found="; ".join(edits),
                where=run.folder.root,
                next_step=f"rerun `porting-kit {step}`; `porting-kit align --edited` judges the edit",
            )
        found = (*found, *edits)
    return found


def read_checkpoint_document(run: PortRun, name: str = "config.json") -> Any:
    """A JSON file of the run's checkpoint: its config, or its tree.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    file = run.folder.checkpoint / name
    try:
        document = read_json(file)
        if name == "config.json" and not isinstance(document, dict):
            raise ValueError(f"a JSON object belongs here, not {json.dumps(document)[:40]}")
        return document
    except FileNotFoundError:
        raise CheckpointError(
            "the run folder holds no checkpoint",
            expected=f"{name} beside the rank files that convert writes",
            found="no such folder" if not file.parent.is_dir() else f"a folder without {name}",
            where=file.parent,
            next_step="run `porting-kit convert` with the same port file and --out",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "a checkpoint file is damaged",
            expected="the JSON file that convert writes",
            found=explain_problem(error),
            where=file,
            next_step="convert the checkpoint again",
        ) from error


def _run_step(run: PortRun, step: str) -> None:
    if step == "patch":
        from porting_kit.steps.patch import patch_port

        patch_port(run)
    elif step == "convert":
        from porting_kit.steps.convert import convert_port

        convert_port(run)
