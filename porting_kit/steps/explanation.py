"""Why an alignment failed: the fault that explains it, or what is wrong with the port's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.result import AlignmentResult
from porting_kit.conversion.unquantised import HEADS
from porting_kit.diagnosis import Diagnosis, Observation, PortState, name_cause
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.changes import LISTED, find_known_faults
from porting_kit.diagnosis.own_model import find_correction, measure_context_error
from porting_kit.steps.checkpoint_check import naming_changes

if TYPE_CHECKING:
    from porting_kit.steps.alignment_session import AlignmentSession


def diagnose_session(
    session: AlignmentSession, result: AlignmentResult, observation: Observation | None = None
) -> Diagnosis:
    """See `AlignmentSession.diagnose`."""
    observed = observation or result
    with naming_changes(session.checkpoint_check):
        undefined = _count_undefined(session.port_state)
        # Without numbers in its base a port's logits tell no fault from another, so none is tried.
        faults = CATALOGUE if all(name.startswith(HEADS) for name in undefined) else ()
        diagnosis = name_cause(session.port_state, observed, faults, result=result)
    if undefined:
        diagnosis = replace(diagnosis, evidence=(_describe_undefined(undefined), *diagnosis.evidence))
    if diagnosis.own_model is not None or not faults or (undefined and diagnosis.to_explain == 0):
        return _explain_port(session, diagnosis, result)
    if diagnosis.to_explain == 0 or not session.checkpoint_check.changes:
        return diagnosis
    return _explain_foreign(session, diagnosis, observed, result)


def _count_undefined(state: PortState) -> dict[str, int]:
    """Tensor -> how many of its values are NaN or infinite, which no conversion writes, where any is.

    Of a head they change what steps accept, and no token.
    """
    counts = {name: int((~tensor.isfinite()).sum()) for name, tensor in state.tensors.items()}
    return {name: count for name, count in counts.items() if count}


def _describe_undefined(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} in {name}" for name, count in list(counts.items())[:LISTED])
    more = f", and {len(counts) - LISTED} more tensors" if len(counts) > LISTED else ""
    return f"values that are no finite numbers: {listed}{more}"


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
