"""When the healthy port emits exactly what was observed and the alignment fails all the same.

Then no fault lies between port and run: the port's own model, the run that was compared, or the judge is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.catalogue import CATALOGUE, find_fault
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortingKitError
from porting_kit.outcomes import Verdict

INVERSES = {
    **{
        name: name
        for name in (
            "gate_and_up_swapped",
            "key_and_value_swapped",
            "norms_swapped",
            "rotary_style_swapped",
            "conv1d_not_transposed",
            "pipeline_stages_exchanged",
            "tensor_ranks_exchanged",
        )
    },
    "q_scale_missing": "q_scale_twice",
    "q_scale_twice": "q_scale_missing",
}
"""Fault -> the fault that undoes it. Made on a port that has it, it brings the base back."""

_OTHER_GATES = {
    "medusa equals greedy": "the port emits other tokens with the tree than without: look at the tree in model.py",
    "batches": "the port emits other tokens in larger batches: look at batch indices in model.py and runtime",
    "repeat": "the same run gives other tokens when it is made again: some state is kept between calls",
    "heads": "the port's heads accept other drafts than the heads in Hugging Face: convert the heads again",
    "fit": "the fitted base lies too far from the original: a fit with more dimensions, or another release",
}


def describe_own_model(result: AlignmentResult | None, left_by_context: int) -> str | None:
    """What is wrong when nothing is left to explain; None when nothing is, or no alignment is there to say so.

    Args:
        result: the alignment.
        left_by_context: what the port's context phase does not explain of what its generation phase emits.
    """
    if left_by_context:
        return (
            "the port's own generation phase differs from its context phase: the healthy port emits exactly this, so "
            "the fault is in the port's module or its tree inputs, not between port and run"
        )
    if result is None or result.verdict is not Verdict.FAIL:
        return None
    gate = result.failing_gate
    if gate in _OTHER_GATES:
        return f"the healthy port emits exactly this, but {_OTHER_GATES[gate]}"
    where = f" {result.layers.sentence}" if result.layers is not None else ""
    return (
        "the port's own model differs from the base: the healthy port emits exactly this, so the fault is in its "
        f"weights, config or model code, not between port and run.{where}"
    )


@dataclass(frozen=True)
class Correction:
    """A change of the port that makes it the base again.

    Args:
        fault: what the port has.
        error: relative logit error against the base that is left.
        before: the error without the change.
        detail: what was changed, in words.
    """

    fault: Fault
    error: float
    before: float
    detail: str

    def describe(self) -> str:
        """One sentence of evidence."""
        return f"{self.detail} brings the port's logits from {self.before:.1e} to within {self.error:.1e} of the base's"


def find_correction(
    state: PortState,
    base_logits: Sequence[torch.Tensor],
    texts: Sequence[Sequence[int]],
    bound: float,
    window: int | None = None,
) -> Correction | None:
    """The one change that makes the port's context phase agree with the base, None when none of those known does.

    Args:
        state: the port, as it is.
        base_logits: the base's, [S, V] per text.
        texts: token ids.
        bound: relative logit error that is noise.
        window: the base's sliding window, which a checkpoint cannot hold.
    """
    candidates = []
    if window is not None and state.attention_window is None:
        fault = find_fault("sliding_window_ignored")
        candidates.append((fault, state.with_window(window), f"a sliding window of {window} tokens"))
    for fault in CATALOGUE:
        inverse = INVERSES.get(fault.name)
        if inverse is not None and fault.applies(state) is None:
            candidates.append((fault, find_fault(inverse).apply(state), f"undoing {fault.name}"))
    before = measure_context_error(state, base_logits, texts)
    found = []
    for fault, corrected, detail in candidates:
        try:
            error = measure_context_error(corrected, base_logits, texts)
        except (PortingKitError, RuntimeError, ValueError):
            continue
        found.append(Correction(fault, error, before, detail))
    best = min(found, key=lambda correction: correction.error, default=None)
    return best if best is not None and best.error <= bound < before else None


def measure_context_error(
    state: PortState, base_logits: Sequence[torch.Tensor], texts: Sequence[Sequence[int]]
) -> float:
    """Worst relative logit error of the port's context phase against the base's; arguments as for `find_correction`."""
    ours = ContextOracle(state.build()).logits(texts)
    return max(relative_error(mine.cpu(), theirs.cpu()) for mine, theirs in zip(ours, base_logits, strict=True))
