"""What would decide between causes that explain an observation equally well: the one further file to bring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from porting_kit.alignment.noise import relative_errors
from porting_kit.diagnosis.fault import LOGITS_FILE, READING, STEPS_FILE, Fault
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.search import Search

CLEAR = 1e-3
"""Relative difference of two hypotheses' logits that a file of logits shows in every dtype but bfloat16."""

NOT_ON_THESE = "other prompts: on these the two compute the same logits and take the same steps"
LONGER = "the same run with longer prompts and more tokens: the two differ by too little on these"


def decide_ties(search: Search, best: Hypothesis, ties: Sequence[Hypothesis]) -> str:
    """The file whose content the tied hypotheses disagree on, or the run to make where none that is missing would do.

    Their predictions are compared, so the advice holds for this port and these prompts.
    """
    faults = [fault for hypothesis in (best, *ties) for fault in hypothesis.faults]
    if any(fault.phase == READING for fault in faults):
        return _decide_readings(search, faults)
    ours, our_steps = search.predicted_logits(*_forms(best))
    for tie in ties:
        theirs, their_steps = search.predicted_logits(*_forms(tie))
        pairs = zip(ours, theirs, strict=True)
        difference = max(float(relative_errors(a.cpu(), b.cpu()).nan_to_num(torch.inf).max()) for a, b in pairs)
        bound = search.observation.logits_noise or CLEAR
        if search.observation.logits is None and difference > bound:
            return LOGITS_FILE
        if search.observation.accepted_lengths is None and our_steps != their_steps:
            return STEPS_FILE
        if 0 < difference <= bound:
            return LONGER
    return NOT_ON_THESE


def _decide_readings(search: Search, faults: Sequence[Fault]) -> str:
    """A fault of the comparison has no model of its own whose predictions could be compared."""
    if all(fault.is_choice for fault in faults):  # of one model's logits, with one model's steps
        return LONGER
    if search.observation.logits is None:
        return LOGITS_FILE
    return STEPS_FILE if search.observation.accepted_lengths is None else LONGER


def _forms(hypothesis: Hypothesis) -> list[tuple]:
    single = len(hypothesis.faults) == 1
    return [(fault, hypothesis.form if single else 0) for fault in hypothesis.faults]
