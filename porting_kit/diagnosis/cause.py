"""Naming the cause: which fault explains what was observed, ranked by what each leaves unexplained.

Two faults that explain the same are named as a tie, and none is named when none fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.hypotheses import (
    Hypothesis,
    Observation,
    focus,
    observe,
    try_fault,
    try_faults,
)
from porting_kit.diagnosis.port_state import PortState

EXPLAINED_SHARE = 0.95
"""A cause is named when it explains this share of what the healthy port does not: histories of near-ties may differ."""

WEAK_EVIDENCE = 3
"""Fewer unexplained tokens and steps than this can be matched by chance."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause, as far as it can be told.

    Args:
        cause: the fault that explains the observation best; None when none fits or nothing is wrong.
        ties: other faults that explain it equally well.
        evidence: sentences with the figures behind it.
        hypotheses: all that were tried, best first, the healthy port among them.
        skipped: fault name -> why this port cannot have it.
        to_explain: tokens and steps that the healthy port does not explain.
        observed: tokens and steps in all.
    """

    cause: Fault | None
    ties: tuple[Fault, ...]
    evidence: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    to_explain: int = 0
    observed: int = 0

    @property
    def verdict(self) -> str:
        """One sentence: the cause, a tie, none of these, or nothing wrong."""
        if self.to_explain == 0:
            return "nothing to explain: the healthy port emits exactly this"
        if self.cause is None:
            return f"none of the {len(self.hypotheses) - 1} faults tried explains the observation"
        if self.ties:
            also = "; ".join(fault.title for fault in self.ties)
            return f"{self.cause.title} - or, explaining it equally well: {also}"
        return self.cause.title

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "verdict": self.verdict,
            "name": None if self.cause is None else self.cause.title,
            "fault": None if self.cause is None else self.cause.name,
            "why": None if self.cause is None else self.cause.cause,
            "fix": None if self.cause is None else self.cause.fix,
            "source": None if self.cause is None else self.cause.source,
            "ties": [fault.title for fault in self.ties],
            "decided_by": self.cause.decided_by if self.cause is not None and self.ties else None,
            "evidence": list(self.evidence),
            "to_explain": self.to_explain,
            "observed": self.observed,
            "ranking": [
                {
                    "name": hypothesis.name,
                    "explained": hypothesis.explained,
                    "unexplained_tokens": hypothesis.unexplained_tokens,
                    "unexplained_steps": hypothesis.unexplained_steps,
                    "logit_error": hypothesis.logit_error,
                    "prompts": hypothesis.prompts,
                    "error": hypothesis.error,
                }
                for hypothesis in self.hypotheses
            ],
            "skipped": dict(self.skipped),
        }


def name_cause(
    state: PortState, observed: Observation | AlignmentResult, faults: Sequence[Fault] = CATALOGUE
) -> Diagnosis:
    """Rank faults by how well each explains what was observed.

    Args:
        state: the healthy port: right weights, exact kernels.
        observed: a failed alignment, or what the port under suspicion emitted.
        faults: hypotheses to try.
    """
    observation = observe(observed) if isinstance(observed, AlignmentResult) else observed
    observation = focus(state, observation)
    healthy_flags, healthy = try_fault(state, None, observation)
    skipped = {fault.name: reason for fault in faults if (reason := fault.applies(state)) is not None}
    possible = [fault for fault in faults if fault.name not in skipped] if healthy_flags.any() else []
    tried = [healthy, *try_faults(state, possible, observation, healthy_flags)]
    ranked = sorted(tried, key=_rank)
    to_explain = int(healthy_flags.sum())
    best, ties = _choose(ranked, to_explain)
    return Diagnosis(
        cause=None if best is None else best.fault,
        ties=tuple(tie.fault for tie in ties),
        evidence=_evidence(best, healthy, ranked, to_explain, len(healthy_flags)),
        hypotheses=tuple(ranked),
        skipped=skipped,
        to_explain=to_explain,
        observed=len(healthy_flags),
    )


def _rank(hypothesis: Hypothesis) -> tuple[Any, ...]:
    error = hypothesis.logit_error if hypothesis.logit_error is not None else 0.0
    return (hypothesis.error is not None, -hypothesis.prompts, hypothesis.unexplained, error, hypothesis.deficit)


def _choose(ranked: Sequence[Hypothesis], to_explain: int) -> tuple[Hypothesis | None, list[Hypothesis]]:
    """The best fault and those that tie with it; (None, []) when none fits."""
    allowed = (1 - EXPLAINED_SHARE) * to_explain
    most = max(hypothesis.prompts for hypothesis in ranked)
    fitting = [
        h for h in ranked if h.fault is not None and h.error is None and h.prompts == most and h.unexplained <= allowed
    ]
    if to_explain == 0 or not fitting:
        return None, []
    best = fitting[0]
    return best, [h for h in fitting[1:] if h.unexplained == best.unexplained and not _is_worse(h, best)]


def _is_worse(other: Hypothesis, best: Hypothesis) -> bool:
    """With logits, ten times the error is a clear difference; with tokens alone, equal counts are a tie."""
    if other.logit_error is None or best.logit_error is None:
        return False
    return other.logit_error > 10 * max(best.logit_error, 1e-9)


def _evidence(
    best: Hypothesis | None, healthy: Hypothesis, ranked: Sequence[Hypothesis], to_explain: int, observed: int
) -> tuple[str, ...]:
    if to_explain == 0:
        return (f"all {observed} observed tokens and steps are the healthy port's own",)
    lines = [f"the healthy port does not explain {to_explain} of {observed} observed tokens and steps"]
    if best is None:
        nearest = next((h for h in ranked if h.fault is not None and h.error is None), None)
        if nearest is not None:
            lines.append(f"nearest is {nearest.name}, which leaves {nearest.unexplained} unexplained")
        return tuple(lines)
    lines.append(f"with {best.name} {best.explained} of those are explained and {best.unexplained} of all are not")
    if best.logit_error is not None:
        lines.append(
            f"its logits are within {best.logit_error:.1e} of the observed ones, healthy {healthy.logit_error:.1e}"
        )
    runner_up = next((h for h in ranked if h.fault is not None and h is not best and h.error is None), None)
    if runner_up is not None:
        where = "" if runner_up.prompts == best.prompts else " of the first prompt"
        lines.append(f"next best is {runner_up.name}, which leaves {runner_up.unexplained}{where} unexplained")
    if to_explain < WEAK_EVIDENCE:
        lines.append("few tokens speak for it: more or longer prompts would make it certain")
    return tuple(lines)
