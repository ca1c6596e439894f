"""Naming the cause: which fault explains what was observed, ranked by what each leaves unexplained.

Faults that explain the same are named as a tie, with what would decide between them, and none is named when none fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.changes import Change, as_cause, describe_changes
from porting_kit.diagnosis.decision import decide_ties
from porting_kit.diagnosis.evidence import collect_evidence
from porting_kit.diagnosis.fault import LOGITS_FILE, Fault
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.lower_precision import CoarserArithmetic, explain_by_rounding
from porting_kit.diagnosis.observation import Observation, observe
from porting_kit.diagnosis.own_model import describe_own_model
from porting_kit.diagnosis.pairs import try_pairs
from porting_kit.diagnosis.port_state import PortState
from porting_kit.diagnosis.search import Search, Shelf

EXPLAINED_SHARE = 0.95
"""A cause is named when it explains this share of what the healthy port does not: histories of near-ties may differ."""

CLEARLY_WORSE = 10.0
"""With logits, this many times the error is a clear difference; with tokens alone, equal counts are a tie."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause, as far as it can be told.

    Args:
        causes: the fault that explains the observation best, or two at once; empty when none fits or nothing is wrong.
        ties: other hypotheses that explain it equally well.
        evidence: sentences with the figures behind it.
        hypotheses: all that were tried, best first, the healthy port among them.
        skipped: fault name -> why this port cannot have it.
        to_explain: tokens, steps and ends that the healthy port does not explain.
        observed: tokens, steps and ends in all.
        decided_by: the one further file that would tell ties, or rounding and a small fault, apart; None for neither.
        own_model: what is wrong although the healthy port explains everything; None when nothing is.
        rounding: the coarser arithmetic that explains what no fault does; None when none does.
        changes: what the port's own checkpoint holds that the rules do not make of its base: the cause, where there is
            any; `causes` are then the known faults that change just this.
        passes: context passes and replays that it took.
    """

    causes: tuple[Fault, ...]
    ties: tuple[Hypothesis, ...]
    evidence: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    to_explain: int = 0
    observed: int = 0
    decided_by: str | None = None
    own_model: str | None = None
    rounding: CoarserArithmetic | None = None
    changes: tuple[Change, ...] = ()
    passes: dict[str, int] = field(default_factory=dict)

    @property
    def cause(self) -> Fault | None:
        """The fault; the first of two."""
        return self.causes[0] if self.causes else None

    @property
    def is_healthy(self) -> bool:
        """Nothing is wrong with the run: it is the port's own, but for rounding that TensorRT itself chooses."""
        benign = self.rounding is not None and self.rounding.is_benign
        return self.own_model is None and not self.changes and (self.to_explain == 0 or benign)

    @property
    def is_sure(self) -> bool:
        """More than chance speaks for the cause; a few near-ties are explained by many faults."""
        return bool(self.changes) or (bool(self.causes) and is_supported(self.hypotheses[0]))

    @property
    def verdict(self) -> str:
        """One sentence: the cause, a tie, none of these, or nothing wrong."""
        if self.changes:
            return describe_changes(self.changes, self.causes)
        if self.own_model is not None:
            return self.own_model
        if self.to_explain == 0:
            return "nothing to explain: the healthy port emits exactly this"
        if self.rounding is not None:
            return self.rounding.describe()
        if not self.causes:
            tried = sum(len(one.faults) == 1 and one.error is None for one in self.hypotheses)
            return f"none of the {tried} faults tried explains the observation"
        title = " and ".join(fault.title for fault in self.causes)
        if not self.is_sure:
            title = f"perhaps, but too few tokens speak for it: {title}"
        if self.ties:
            also = "; ".join(" and ".join(fault.title for fault in tie.faults) for tie in self.ties)
            return f"{title} - or, explaining it equally well: {also}"
        return title

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        causes = self.causes
        return {
            "verdict": self.verdict,
            "healthy": self.is_healthy,
            "sure": self.is_sure,
            "name": " and ".join(fault.title for fault in causes) or None,
            "fault": " + ".join(fault.name for fault in causes) or None,
            "kind": " + ".join(dict.fromkeys(fault.kind for fault in causes)) or None,
            "why": "; ".join(fault.cause for fault in causes) or None,
            "fix": "; ".join(fault.fix for fault in causes) or None,
            "source": "; ".join(fault.source for fault in causes) or None,
            "releases": "; ".join(fault.releases for fault in causes) or None,
            "ties": [" and ".join(fault.title for fault in tie.faults) for tie in self.ties],
            "decided_by": self.decided_by,
            "own_model": self.own_model,
            "evidence": list(self.evidence),
            "to_explain": self.to_explain,
            "observed": self.observed,
            "passes": dict(self.passes),
            "ranking": [
                {
                    "name": hypothesis.name,
                    "explained": hypothesis.explained,
                    "out_of": hypothesis.out_of,
                    "says": hypothesis.describe(),
                    "unexplained_tokens": hypothesis.unexplained_tokens,
                    "unexplained_steps": hypothesis.unexplained_steps,
                    "unexplained_ends": hypothesis.unexplained_ends,
                    "logit_error": hypothesis.logit_error,
                    "prompts": hypothesis.prompts,
                    "error": hypothesis.error,
                }
                for hypothesis in self.hypotheses
            ],
            "skipped": dict(self.skipped),
            **(as_cause(self.changes, self.causes) | {"evidence": list(self.evidence)} if self.changes else {}),
        }


def name_cause(
    state: PortState,
    observed: Observation | AlignmentResult,
    faults: Sequence[Fault] = CATALOGUE,
    *,
    result: AlignmentResult | None = None,
    shelf: Shelf | None = None,
    pair_seconds: float = 60.0,
) -> Diagnosis:
    """Rank faults by how well each explains what was observed.

    Args:
        state: the healthy port: right weights, exact kernels.
        observed: a failed alignment, or what the port under suspicion emitted.
        faults: hypotheses to try.
        result: the alignment of the same tokens, for what it knows beyond the observation.
        shelf: where models come from; one that keeps them saves time when the port is asked about again.
        pair_seconds: processor time that the search for two faults at once may take; 0 leaves it out.
    """
    if isinstance(observed, AlignmentResult):
        result, observed = observed, observe(observed)
    search = Search(shelf or Shelf(state), observed, seconds=pair_seconds)
    healthy = search.healthy
    to_explain = healthy.unexplained
    if to_explain and not healthy.first_tokens.any() and search.replays_as_observed:
        to_explain = 0
    skipped = {fault.name: reason for fault in faults if (reason := fault.applies(state)) is not None}
    possible = [fault for fault in faults if fault.name not in skipped] if to_explain else []
    tried = [search.try_single(fault) for fault in possible]
    best, ties = choose(tried, to_explain)
    if best is None and to_explain and pair_seconds > 0:
        pairs = try_pairs(search, tried)
        tried += pairs[:FEW]
        best, ties = choose(pairs, to_explain)
    rounding = None
    if to_explain and (best is None or not is_supported(best)) and not healthy.ends.any():
        rounding = explain_by_rounding(search)
        best, ties = (best, ties) if rounding is None else (None, [])
    named = [] if best is None else [best, *ties]
    no_fault = replace(healthy.figures, out_of=to_explain)
    rest = [hypothesis for hypothesis in (no_fault, *tried) if hypothesis not in named]
    ranked = [*named, *sorted(rest, key=lambda hypothesis: hypothesis.order)]
    return Diagnosis(
        causes=() if best is None else best.faults,
        ties=tuple(ties),
        evidence=tuple(collect_evidence(search, best, ranked, to_explain, result)),
        hypotheses=tuple(ranked),
        skipped=skipped,
        to_explain=to_explain,
        observed=healthy.observed,
        decided_by=_find_deciding_file(search, best, ties, rounding),
        own_model=describe_own_model(result, healthy.unexplained) if to_explain == 0 else None,
        rounding=rounding,
        passes={"context": search.context_passes, "replays": search.replays},
    )


def _find_deciding_file(
    search: Search, best: Hypothesis | None, ties: Sequence[Hypothesis], rounding: CoarserArithmetic | None
) -> str | None:
    if rounding is not None:
        return LOGITS_FILE if search.observation.logits is None else None
    return decide_ties(search, best, ties) if best is not None and ties else None


FEW = 5
"""Pairs that the ranking lists."""

WEAK_EVIDENCE = 3
"""Fewer explained tokens than this can be matched by chance, where no logits are there to be matched."""

WEAK_ESTIMATE = 6
"""The same for a value that was read off the observation, and for two faults at once."""


def is_supported(best: Hypothesis) -> bool:
    """Whether more than chance speaks for a hypothesis.

    Logits are matched by no chance, but how tokens were chosen is told by the tokens alone.
    """
    if best.explained_ends:
        return True
    if best.logit_error is not None and not any(fault.is_choice for fault in best.faults):
        return True
    is_flexible = best.detail is not None or len(best.faults) > 1
    return best.explained >= (WEAK_ESTIMATE if is_flexible else WEAK_EVIDENCE)


def choose(tried: Sequence[Hypothesis], to_explain: int) -> tuple[Hypothesis | None, list[Hypothesis]]:
    """The best hypothesis and those that tie with it; (None, []) when none fits."""
    allowed = (1 - EXPLAINED_SHARE) * to_explain
    usable = [hypothesis for hypothesis in tried if hypothesis.error is None]
    most = max((hypothesis.prompts for hypothesis in usable), default=0)
    fitting = [h for h in usable if h.prompts == most > 0 and h.unexplained <= allowed and h.explained]
    if to_explain == 0 or not fitting:
        return None, []
    best = min(fitting, key=lambda hypothesis: (hypothesis.is_broad, hypothesis.order))
    others = [h for h in fitting if h is not best and h.unexplained == best.unexplained and h.is_broad == best.is_broad]
    return best, [h for h in others if not _is_worse(h, best)]


def _is_worse(other: Hypothesis, best: Hypothesis) -> bool:
    if other.logit_error is None or best.logit_error is None:
        return False
    return other.logit_error > CLEARLY_WORSE * max(best.logit_error, 1e-9)
