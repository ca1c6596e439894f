"""Why an alignment failed: the fault that explains it, or what is wrong with the port's own checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis import Diagnosis, Observation, PortState, name_cause
from porting_kit.diagnosis.changes import find_known_faults
from porting_kit.diagnosis.own_model import find_correction, measure_context_error
from porting_kit.outcomes import Verdict
from porting_kit.steps.checkpoint_check import naming_changes

if TYPE_CHECKING:
    from porting_kit.steps.alignment_session import AlignmentSession


def diagnose_session(
    session: AlignmentSession, result: AlignmentResult, observation: Observation | None = None
) -> Diagnosis:
    """See `AlignmentSession.diagnose`."""
    with naming_changes(session.checkpoint_check):
        if result.verdict is not Verdict.PASS and session.checkpoint_check.holds_no_numbers:
            # Its logits say nothing that one fault could be told from another by, so none is tried.
            untried = name_cause(session.port_state, observation or result, (), result=result)
            return _explain_port(session, untried, result)
        diagnosis = name_cause(session.port_state, observation or result, result=result)
    if diagnosis.own_model is not None:
        return _explain_port(session, diagnosis, result)
    if diagnosis.to_explain == 0 or not session.checkpoint_check.changes:
        return diagnosis
    return _explain_foreign(session, diagnosis, observation or result, result)


def _explain_foreign(
    session: AlignmentSession, diagnosis: Diagnosis, observed: Observation | AlignmentResult, result: AlignmentResult
) -> Diagnosis:
    """What another run emitted, where this checkpoint is changed: asked of the port as the rules make it."""
    check = session.checkpoint_check
    said = tuple(change.describe() for change in check.changes)
    if not check.is_correctable:
        return replace(diagnosis, evidence=(*diagnosis.evidence, *said))
    asked = name_cause(check.set_right(session.port_state), observed, result=result)
    if asked.to_explain == 0:  # the run is right, and this checkpoint is not
        return _explain_port(session, diagnosis, result)
    remark = "this port's checkpoint, set right for these figures, is not what the rules make of its base"
    return replace(asked, evidence=(*asked.evidence, f"{remark}: {'; '.join(said)}"))


def _explain_port(session: AlignmentSession, diagnosis: Diagnosis, result: AlignmentResult) -> Diagnosis:
    """The same with what is wrong with the port itself: its checkpoint, then a change that makes it its base."""
    check, state = session.checkpoint_check, session.port_state
    if check.changes:
        held = replace(state, tensors=check.held)
        known = find_known_faults(replace(held, config=check.right_config, tensors=check.right), held)
        said = [change.describe() for change in check.changes]
        seen = [diagnosis.own_model] if diagnosis.own_model is not None else []
        evidence = (*said, *seen, *diagnosis.evidence)
        diagnosis = replace(diagnosis, changes=check.changes, causes=known, ties=(), evidence=evidence)
        state = check.set_right(state)
    return diagnosis if diagnosis.own_model is None else _explain_own_model(session, diagnosis, result, state)


def _explain_own_model(
    session: AlignmentSession, diagnosis: Diagnosis, result: AlignmentResult, state: PortState
) -> Diagnosis:
    """The same with what makes the port its base: its checkpoint set right, or one further change that is known."""
    texts = [[*prompt, *text.tokens] for prompt, text in zip(result.prompts, result.texts, strict=True)]
    with session.matched(result):
        base_logits = session.reference.logits(texts)
    bound = ERROR_FACTOR * result.noise.relative_error
    if diagnosis.changes:
        left = measure_context_error(state, base_logits, texts)
        sentence = f"with the checkpoint set right the port's logits are within {left:.1e} of the base's"
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, sentence))
        if left <= bound:
            return diagnosis
    found = find_correction(state, base_logits, texts, bound, session.base.sliding_window)
    if found is None:
        return diagnosis
    evidence = (*diagnosis.evidence, found.describe())
    return replace(diagnosis, causes=(*diagnosis.causes, found.fault), evidence=evidence)
