"""Naming the cause: the port under every hypothesis, made to emit what was observed, ranked by what each explains.

Under the right hypothesis every emitted token is the model's own best token, within noise, and every step accepts as
many as was observed. One wrong token does not disturb the judgement of the next, because the history is the observed
one. Two hypotheses that explain the same are named as a tie, and none is named when none fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.oracle import token_margins
from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.catalogue import CATALOGUE
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortingKitError
from porting_kit.medusa.decoding import replay

NO_FAULT = "no fault"
EXPLAINED_SHARE = 0.95
"""A cause is named when it explains this share of what the healthy port does not: histories of near-ties may differ."""

NEAR_TIE_SHARE = 0.05
"""More near-ties than this are no noise: a model without an opinion would explain everything."""

FOCUS = 4
"""Hypotheses are tried on this many prompts, those that the healthy port explains worst."""

WEAK_EVIDENCE = 3
"""Fewer unexplained tokens and steps than this can be matched by chance."""


@dataclass(frozen=True)
class Observation:
    """What a run of the port produced.

    Args:
        prompts: token ids.
        tokens: emitted ids per prompt, at least one each.
        accepted_lengths: accepted tokens per generation step and prompt; None when not known.
        logits: [n, V] per prompt, the logits behind each emitted token; None when not known.
        tolerance: near-tie tolerance in logits, from `alignment.noise`.
        logits_noise: relative logit error that is noise.
    """

    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    tolerance: float
    accepted_lengths: Sequence[Sequence[int]] | None = None
    logits: Sequence[torch.Tensor] | None = None
    logits_noise: float | None = None

    def select(self, chosen: Sequence[int]) -> Observation:
        """The same for some of the prompts."""

        def pick(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[index] for index in chosen]

        return replace(
            self,
            prompts=pick(self.prompts),
            tokens=pick(self.tokens),
            accepted_lengths=pick(self.accepted_lengths),
            logits=pick(self.logits),
        )


@dataclass(frozen=True)
class Hypothesis:
    """How well one fault explains an observation.

    Args:
        fault: the fault, None for the healthy port.
        unexplained_tokens: emitted tokens that are not the hypothetical model's best, beyond noise.
        unexplained_steps: steps that would have accepted another number of tokens; 0 when not observed.
        explained: of the tokens and steps that the healthy port does not explain, how many this one does.
        logit_error: worst relative error against the observed logits; None without them.
        deficit: sum of the logits by which emitted tokens fall short.
        error: why it could not be tried; then the counts mean nothing.
    """

    fault: Fault | None
    unexplained_tokens: int = 0
    unexplained_steps: int = 0
    explained: int = 0
    logit_error: float | None = None
    deficit: float = 0.0
    error: str | None = None

    @property
    def name(self) -> str:
        """The fault's name."""
        return NO_FAULT if self.fault is None else self.fault.name

    @property
    def unexplained(self) -> int:
        """Tokens and steps together."""
        return self.unexplained_tokens + self.unexplained_steps


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
                    "error": hypothesis.error,
                }
                for hypothesis in self.hypotheses
            ],
            "skipped": dict(self.skipped),
        }


def observe(result: AlignmentResult) -> Observation:
    """What an alignment saw, with its own measured noise."""
    return Observation(
        prompts=result.prompts,
        tokens=[text.tokens for text in result.texts],
        tolerance=result.noise.near_tie_tolerance,
        accepted_lengths=result.accepted_lengths,
        logits=result.logits,
        logits_noise=ERROR_FACTOR * result.noise.relative_error,
    )


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
    state = _in_fast_dtype(state)
    observation = _focus(state, observation)
    healthy_flags, healthy = _try(state, None, observation)
    skipped = {fault.name: reason for fault in faults if (reason := fault.applies(state)) is not None}
    tried = [healthy]
    for fault in faults if healthy_flags.any() else ():
        if fault.name not in skipped:
            flags, hypothesis = _try(state, fault, observation)
            tried.append(_count_explained(hypothesis, flags, healthy_flags))
    ranked = sorted(tried, key=_rank)
    to_explain = int(healthy_flags.sum())
    best, ties = _choose(ranked, to_explain, observation)
    return Diagnosis(
        cause=None if best is None else best.fault,
        ties=tuple(tie.fault for tie in ties),
        evidence=_evidence(best, healthy, ranked, to_explain, len(healthy_flags)),
        hypotheses=tuple(ranked),
        skipped=skipped,
        to_explain=to_explain,
        observed=len(healthy_flags),
    )


def _in_fast_dtype(state: PortState) -> PortState:
    """Half precision is slow on a CPU; float32 over the same rounded weights is within the tolerance."""
    is_half = str(state.config.get("dtype")) in ("float16", "bfloat16")
    return replace(state, dtype="float32") if is_half and state.emulator.device.type == "cpu" else state


def _focus(state: PortState, observation: Observation) -> Observation:
    """The prompts that say most: those with the most tokens and steps that the healthy port does not explain."""
    if len(observation.prompts) <= FOCUS:
        return observation
    model = state.build()
    counts = [
        int(_judge(model, state, observation.select([index]))[0].sum()) for index in range(len(observation.prompts))
    ]
    chosen = sorted(range(len(counts)), key=lambda index: -counts[index])[:FOCUS]
    return observation.select(sorted(chosen))


def _try(state: PortState, fault: Fault | None, observation: Observation) -> tuple[torch.Tensor, Hypothesis]:
    """Run one hypothesis; bool [tokens + steps], true where it does not explain, and the figures."""
    try:
        model = (state if fault is None else fault.apply(state)).build()
        flags, figures = _judge(model, state, observation)
        return flags, replace(figures, fault=fault)
    except (PortingKitError, RuntimeError, TypeError, ValueError) as error:
        if fault is None:
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return torch.zeros(0, dtype=torch.bool), Hypothesis(fault, error=reason[0])


def _judge(model: Any, state: PortState, observation: Observation) -> tuple[torch.Tensor, Hypothesis]:
    replayed = replay(model, observation.prompts, observation.tokens, state.tree)
    tokens = torch.cat([torch.as_tensor(row) for row in observation.tokens])
    margins, preferred = token_margins(torch.cat([logits.cpu() for logits in replayed.logits]), tokens)
    wrong_tokens = ~(margins >= -observation.tolerance)
    near_ties = ~wrong_tokens & (preferred != tokens)
    if near_ties.sum() > max(NEAR_TIE_SHARE * len(tokens), 1):
        wrong_tokens = wrong_tokens | near_ties
    wrong_steps = _compare_steps(observation, replayed.accepted_lengths)
    logit_error = None
    if observation.logits is not None:
        observed = zip(replayed.logits, observation.logits, strict=True)
        logit_error = max(relative_error(ours.cpu(), theirs.cpu()) for ours, theirs in observed)
    figures = Hypothesis(
        None,
        unexplained_tokens=int(wrong_tokens.sum()),
        unexplained_steps=int(wrong_steps.sum()),
        logit_error=logit_error,
        deficit=float(-margins.clamp(max=0).sum()),
    )
    return torch.cat([wrong_tokens, wrong_steps]), figures


def _compare_steps(observation: Observation, replayed: Sequence[Sequence[int]]) -> torch.Tensor:
    """bool, one per observed step: the replay had no step that starts at this token and accepts as many."""
    if observation.accepted_lengths is None:
        return torch.zeros(0, dtype=torch.bool)
    flags = []
    for tokens, observed, again in zip(observation.tokens, observation.accepted_lengths, replayed, strict=True):
        starts, root = {}, 1
        for length in again:
            starts[root] = min(length, len(tokens) - root)
            root += length
        root = 1
        for length in observed:
            flags.append(starts.get(root) != min(length, len(tokens) - root))
            root += length
    return torch.tensor(flags, dtype=torch.bool)


def _count_explained(hypothesis: Hypothesis, flags: torch.Tensor, healthy: torch.Tensor) -> Hypothesis:
    explained = int((healthy & ~flags).sum()) if len(flags) else 0
    return replace(hypothesis, explained=explained)


def _rank(hypothesis: Hypothesis) -> tuple[Any, ...]:
    error = hypothesis.logit_error if hypothesis.logit_error is not None else 0.0
    return (hypothesis.error is not None, hypothesis.unexplained, error, hypothesis.deficit)


def _choose(
    ranked: Sequence[Hypothesis], to_explain: int, observation: Observation
) -> tuple[Hypothesis | None, list[Hypothesis]]:
    """The best fault and those that tie with it; (None, []) when none fits."""
    if to_explain == 0:
        return None, []
    allowed = (1 - EXPLAINED_SHARE) * to_explain
    fitting = [h for h in ranked if h.fault is not None and h.error is None and h.unexplained <= allowed]
    bound = observation.logits_noise
    if bound is not None and observation.logits is not None:
        fitting = [h for h in fitting if h.logit_error is not None and h.logit_error <= bound]
    if not fitting:
        return None, []
    best = fitting[0]
    decided_by_logits = observation.logits is not None
    ties = [h for h in fitting[1:] if h.unexplained == best.unexplained and not _is_worse(h, best, decided_by_logits)]
    return best, ties


def _is_worse(other: Hypothesis, best: Hypothesis, decided_by_logits: bool) -> bool:
    """With logits, ten times the error is a clear difference; with tokens alone, equal counts are a tie."""
    if not decided_by_logits:
        return False
    return (other.logit_error or 0.0) > 10 * max(best.logit_error or 0.0, 1e-9)


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
        lines.append(f"next best is {runner_up.name}, which leaves {runner_up.unexplained} unexplained")
    if to_explain < WEAK_EVIDENCE:
        lines.append("few tokens speak for it: more or longer prompts would make it certain")
    return tuple(lines)
