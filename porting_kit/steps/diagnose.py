"""Diagnose what an engine produced: which fault of the port explains these tokens?

The healthy port runs in the emulator under each hypothesis, made to say what was observed. The observation comes from
the capture script's file, from files of TensorRT-LLM's own run script, or of this project's emulator in that format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis import Diagnosis, observe
from porting_kit.diagnosis.observation import PADDED_TO
from porting_kit.engine.captured import CapturedSequence
from porting_kit.engine.captured_runs import is_capture_file, read_capture_file
from porting_kit.engine.output_files import find_logits_file
from porting_kit.errors import CapturedFileError
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.steps.align import describe_edits
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.captured_alignment import align_capture
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.prerequisites import require_steps
from porting_kit.whole_files import write_json, write_text

RESULT_FILE, PAGE_FILE = "diagnosis.json", "diagnosis.html"


@dataclass(frozen=True)
class DiagnoseResult:
    """The diagnosis, and an outcome that fails when there is something to explain."""

    outcome: StepOutcome
    diagnosis: Diagnosis

    def document(self) -> dict[str, Any]:
        """The `--json` document: verdict, cause, evidence, fix, next best causes."""
        found = self.diagnosis.as_dict()
        return {**found, "conclusion": found["verdict"], **self.outcome.as_dict()}


def diagnose_port(run: PortRun, observed: Path, logits: Path | None = None, *, edited: bool = False) -> DiagnoseResult:
    """Rank the catalogue's faults by how well each explains an observation.

    Args:
        run: the port; patch and convert are run when they have not been.
        observed: the capture script's file, or `--output_npy` or `--output_csv` of the run script, on the port's own
            prompts.
        logits: `--output_logits_npy`, which tells more faults apart.
        edited: take products that were edited since their step made them, and say so, instead of refusing them.

    Raises:
        CapturedFileError: the files do not belong to this port's prompts.
        RunFolderError: a step before is stale, or what it made was edited.
    """
    for file in (observed, *([find_logits_file(logits)] if logits is not None else [])):
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise CapturedFileError(
                f"the observed file {what}",
                expected="a file of run.py (--output_npy, --output_csv, --output_logits_npy) or of the capture script",
                found="a folder" if file.is_dir() else "nothing",
                where=file,
                next_step="name a file of an engine",
            )
    edits = require_steps(run, "patch", "convert", edited=edited)
    watch = Stopwatch()
    session = AlignmentSession(run, keeps_prompts=True)
    if is_capture_file(observed):
        judged = align_capture(session, read_capture_file(observed))
        observation = observe(judged)
    else:
        session, sequences = _read_observed(session, observed, logits)
        judged = session.align_captured(sequences)
        observation = replace(observe(judged), overrun=[sequence.ran_past_end for sequence in sequences])
        if logits is not None:
            rows = [torch.from_numpy(sequence.logits[:, : session.reference.vocab_size]) for sequence in sequences]
            observation = replace(observation, logits=rows)
    diagnosis = session.diagnose(judged, observation)
    write_json(run.folder.root / RESULT_FILE, diagnosis.as_dict())
    write_text(run.folder.root / PAGE_FILE, _render(run, diagnosis, judged))
    return DiagnoseResult(_judge(diagnosis, watch.seconds, edits), diagnosis)


def _read_observed(
    session: AlignmentSession, observed: Path, logits: Path | None
) -> tuple[AlignmentSession, list[CapturedSequence]]:
    """The file of an engine that answered the prompts as they are, or of an alignment that cut them."""
    try:
        return session, session.read_captured(observed, logits, padded_to=PADDED_TO)
    except CapturedFileError:
        if session.base.length_threshold is None:
            raise
        cutting = AlignmentSession(session.run)
        if cutting.prompts == session.prompts:
            raise
        return cutting, cutting.read_captured(observed, logits, padded_to=PADDED_TO)


def _render(run: PortRun, diagnosis: Diagnosis, judged: AlignmentResult) -> str:
    from porting_kit.display.diagnosis_page import render_diagnosis

    return render_diagnosis(run.port.name, diagnosis.as_dict(), judged.as_dict())


def _judge(diagnosis: Diagnosis, seconds: float, edits: Sequence[str]) -> StepOutcome:
    found = diagnosis.as_dict()
    healthy = diagnosis.is_healthy
    named = "a changed checkpoint" if diagnosis.changes else found["fault"] or "none of the known faults"
    figures = {"to_explain": diagnosis.to_explain, "observed": diagnosis.observed, "edited": list(edits)}
    return StepOutcome(
        "diagnose",
        Verdict.PASS if healthy else Verdict.FAIL,
        "; ".join([diagnosis.verdict, *([describe_edits(edits)] if edits else [])]),
        figures={**figures, "next_step": found["fix"]},
        products=(RESULT_FILE, PAGE_FILE),
        seconds=round(seconds, 3),
        failing_gate=None if healthy else named,
    )


def format_diagnosis(result: DiagnoseResult) -> str:
    """Cause, evidence, fix and ranking, for a terminal."""
    found = result.diagnosis.as_dict()
    lines = [f"diagnosis: {result.outcome.summary}"]
    lines += [f"{part}: {found[part]}" for part in ("why", "fix", "source") if found[part]]
    if found["decided_by"]:
        lines.append(f"to decide between them: {found['decided_by']}")
    lines += [f"evidence: {sentence}" for sentence in found["evidence"]]
    if result.diagnosis.passes:
        lines.append("cost: {context} context passes, {replays} replays".format(**result.diagnosis.passes))
    lines += [f"  {row['name']}: {row['says']}" for row in [row for row in found["ranking"] if not row["error"]][:5]]
    return "\n".join(lines)
