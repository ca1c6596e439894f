"""The align step: does the port say what its base model says, and if not, why?

The base runs in Hugging Face, the port in the emulator (or its tokens come from an engine). Every emitted token is
judged by the base; the layers are compared one by one; a failure is given a cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from porting_kit.errors import KernelRefusal
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.steps.alignment_session import AlignmentSession, current_rank
from porting_kit.steps.context import PortRun, finish_step, running_step
from porting_kit.steps.prerequisites import require_steps
from porting_kit.steps.ranks import explain_ranks, join_ranks, launch_ranks, needs_ranks, wait_for_ranks, world_size
from porting_kit.whole_files import replace_folder, write_json

RESULT_FILE = "alignment.json"
TOKENS_FILE = "output_ids.npy"


@dataclass(frozen=True)
class AlignResult:
    """What the alignment found.

    Args:
        outcome: the step's outcome.
        alignment: the full result; None when the release's kernels refused the model.
        tokenizer: the base's, to show tokens as text; None when there is none.
    """

    outcome: StepOutcome
    alignment: Any
    tokenizer: Any = None

    @property
    def cause(self) -> Mapping[str, Any] | None:
        """The named cause of a failure, None for a pass."""
        return None if self.alignment is None else self.alignment.cause

    def document(self) -> dict[str, Any]:
        """The `--json` document: the outcome's keys and the alignment's, which win where both have one; but the
        outcome's summary says more."""
        found = {} if self.alignment is None else self.alignment.as_dict()
        defaults = {
            "tokens_equal": None, "near_ties": None, "first_divergence": None, "tokens_per_step": None,
            "approximate_fit": None,
        }  # fmt: skip
        return {**defaults, **self.outcome.as_dict(), **found, "summary": self.outcome.summary}


def align_port(run: PortRun, session: AlignmentSession | None = None, *, edited: bool = False) -> AlignResult:
    """Align the run's checkpoint with its base.

    Args:
        run: the run; patch and convert are run first where they have not finished in it.
        session: the opened parts, for a caller that goes on using them; opened here when None.
        edited: judge products that were edited since their step made them, and say so, instead of refusing them.

    Raises:
        RunFolderError: a step before is stale, or what it made was edited.
        BaseModelError: the base cannot be loaded, or is itself broken in the port's dtype.
        CheckpointError: prompts and new tokens are longer than the kernel fit reaches.
        CapturedFileError: files brought back do not belong to this port.
        EnvironmentMissing: the engine or kernel asked for needs a machine that this is not.
    """
    _require_possible(run)
    join_ranks(run)
    if current_rank():
        return _follow(run)
    edits = require_steps(run, "patch", "convert", edited=edited)
    wait_for_ranks()
    with running_step(run, "align") as watch:
        session = session or AlignmentSession(run)
        try:
            alignment = launch_ranks(run) if needs_ranks(run) else align_session(session)
        except KernelRefusal as refusal:
            outcome = StepOutcome(
                "align", Verdict.REFUSED, refusal.subject, figures=refusal.as_dict(), failing_gate=refusal.expected
            )
            return AlignResult(finish_step(run, outcome, watch), None, session.reference.tokenizer)
        with replace_folder(run.folder.alignment) as folder:
            write_json(folder / RESULT_FILE, alignment.as_dict())
            session.write_tokens(folder / TOKENS_FILE, alignment)
        outcome = _judge(alignment, session, edits)
        return AlignResult(finish_step(run, outcome, watch), alignment, session.reference.tokenizer)


def align_session(session: AlignmentSession) -> Any:
    """Align what is opened and explain the result; on several ranks every one of them calls this. Writes nothing."""
    session.require_fitted_length()
    if session.run.port.engine == "captured":
        return session.explain(session.align_captured())
    result = session.align()
    if world_size(session.run) == 1:
        return session.explain(result)
    return explain_ranks(session, replace(result, layers=session.compare_layers(result)))


def _follow(run: PortRun) -> AlignResult:
    """One of the ranks that only take part: same calls, same verdict, nothing written."""
    wait_for_ranks()
    session = AlignmentSession(run)
    try:
        alignment = align_session(session)
    except KernelRefusal as refusal:
        return AlignResult(StepOutcome("align", Verdict.REFUSED, refusal.subject), None)
    return AlignResult(_judge(alignment, session), alignment)


def _require_possible(run: PortRun) -> None:
    """Refuse what this version or machine cannot do, and files that are not there, before anything is loaded."""
    from porting_kit.emulator.xqa import open_xqa_kernel
    from porting_kit.engine.run import find_environment
    from porting_kit.errors import EnvironmentMissing
    from porting_kit.steps.prompts import require_captured

    require_captured(run.port)
    if run.port.kernel == "xqa" and run.port.engine == "emulator":
        open_xqa_kernel(run.port.target.tokens_per_block)
    if run.port.engine == "tensorrt_llm":
        missing = find_environment().missing
        raise EnvironmentMissing(
            "the engine cannot be run from here",
            expected="TensorRT-LLM's own run script, on a machine with the engine",
            found=missing or "an engine is run by TensorRT-LLM's own run script",
            next_step="run the plan of the build step on the build machine, bring the output file back, and align with "
            "engine: captured",
        )


def _judge(alignment: Any, session: AlignmentSession, edits: Sequence[str] = ()) -> StepOutcome:
    document = alignment.as_dict()
    figures = {
        key: document[key]
        for key in ("tokens_equal", "near_ties", "wrong_tokens", "first_divergence", "tokens_per_step", "context_error",
                    "tree_error", "approximate_fit", "cause")
    }  # fmt: skip
    figures |= {"prompts": session.prompt_note, "kernel": run_kernel(session), "runs": document["runs"]}
    figures["fit"] = session.fit_in_effect
    cause = alignment.cause or {}
    figures["next_step"] = cause.get("fix")
    summary = alignment.summary
    check = session.checkpoint_check
    fields = [change.describe() for change in check.fields]
    tensors = [change.describe() for change in check.tensors] if edits else []  # reads both sides
    figures |= {"edited": list(edits), "changed_fields": fields, "changed_tensors": tensors}
    changed = [*fields, *tensors]
    if alignment.verdict is Verdict.PASS and changed:
        summary = f"{summary}; not what the rules write, without effect here: {'; '.join(changed)}"
    if edits:
        summary = f"{summary}; {describe_edits(edits)}"
    if cause.get("name"):
        summary = f"{summary.rstrip('.')}. Cause: {cause['name']}."
    return StepOutcome(
        "align",
        alignment.verdict,
        summary,
        covered=tuple(Coverage(item) for item in alignment.covered),
        figures=figures,
        products=(f"alignment/{RESULT_FILE}", f"alignment/{TOKENS_FILE}"),
        failing_gate=alignment.failing_gate,
    )


def describe_edits(edits: Sequence[str]) -> str:
    """What was judged although nobody but an editor made it, in one clause."""
    return f"judged as edited since the step that made it: {'; '.join(edits)}"


def run_kernel(session: AlignmentSession) -> str:
    """Whose arithmetic the tokens came from: a kernel profile, the real kernel's build, or an engine."""
    if session.run.port.engine == "captured":
        return "engine"
    real = session.kernel.attend_tree
    return session.kernel.name if real is None else str(real.build)


def describe_divergence(first: Mapping[str, Any]) -> str:
    """The first token that is not the base's best, in one line; an engine's tokens come without a phase."""
    phase = f", {first['phase']}" if first["phase"] else ""
    return (
        f"prompt {first['prompt']}, position {first['position']}{phase}: token {first['emitted']}, the base prefers "
        f"{first['preferred']} by {-first['margin']:.4g} logits ({first['kind'].replace('_', '-')})"
    )


def describe_inherent(item: Any) -> str:
    """A difference that TensorRT-LLM makes whatever the port does, and how it was judged, in one line."""
    moved = "" if item.logit_error is None else f" (moves the base's logits by {item.logit_error:.1e})"
    judged = "the base was judged in this form" if item.matched else "the base cannot be judged in this form"
    return f"{item.name}{moved}: {judged}"


def format_alignment(result: AlignResult) -> str:
    """The gates, the first divergence and the cause, for a terminal."""
    lines = []
    if result.alignment is not None:
        for gate in result.alignment.gates:
            word = {True: "pass", False: "FAIL", None: "not run"}[gate.passed]
            lines.append(f"{word:<8} {gate.name}: {gate.detail}")
        document = result.alignment.as_dict()
        if document["first_divergence"]:
            lines.append(f"first divergence: {describe_divergence(document['first_divergence'])}")
        lines += [f"inherent: {describe_inherent(item)}" for item in result.alignment.inherent if item.applies]
        if document["tokens_per_step"] is not None:  # an engine's captured tokens come without step counts
            lines.append(f"tokens per step: {document['tokens_per_step']:.2f}")
    if result.outcome.figures.get("fit"):
        lines.append(f"kernel fit in effect: {result.outcome.figures['fit']}")
    cause = result.cause
    if cause:
        lines.append(f"cause: {cause.get('name') or cause.get('verdict') or 'none of the known faults'}")
        lines += [f"fix: {cause['fix']}"] if cause.get("fix") else []
        lines += [f"evidence: {sentence}" for sentence in cause.get("evidence", ())] if cause.get("changes") else []
    covered = ", ".join(item.value for item in result.outcome.covered) or "nothing"
    rest = ", ".join(result.outcome.as_dict()["not_covered"])
    lines.append(f"covered: {covered}; not covered: {rest}")
    lines.append(f"align: {result.outcome.said}")
    return "\n".join(lines)
