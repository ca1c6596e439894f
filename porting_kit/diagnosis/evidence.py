"""The figures behind a diagnosis, as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from porting_kit.alignment.oracle import Status
from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.search import RULED_OUT_FIRST, Search

NEARER = 0.3
"""A fault that leaves this share of the logits' typical error comes near."""


def collect_evidence(
    search: Search,
    best: Hypothesis | None,
    ranked: Sequence[Hypothesis],
    to_explain: int,
    result: AlignmentResult | None,
) -> list[str]:
    """Sentences, the weightiest first.

    Args:
        search: what was tried.
        best: the cause, None when none fits.
        ranked: every hypothesis, best first.
        to_explain: what the healthy port leaves.
        result: the alignment, which knows where each token came from; None for an engine's files.
    """
    healthy = search.healthy
    parts = "tokens, steps and ends of texts" if healthy.ends.any() else "tokens and steps"
    observed = f"{healthy.observed} observed {parts}"
    if to_explain == 0:
        return [f"all {observed} are the healthy port's own"]
    where = _describe_prompts(search)
    lines = [f"the healthy port does not explain {to_explain} of {observed}{where}"]
    lines += _describe_phase(search)
    if result is not None:
        lines += describe_origins(result)
    faults = [hypothesis for hypothesis in ranked if hypothesis.faults and hypothesis.error is None]
    if best is None:
        if faults:
            lines.append(f"nearest is {faults[0].name}, which {faults[0].describe()}")
            lines += _describe_nearness(healthy.figures, faults)
        return lines
    lines.append(f"with {best.name} {best.explained} of those are explained and {best.unexplained} of all are not")
    if best.detail is not None:
        lines.append(f"the choices ask for {best.detail}")
    if best.logit_error is not None:
        error = healthy.figures.logit_error
        lines.append(f"its logits are within {best.logit_error:.1e} of the observed ones, healthy {error:.1e}")
    runner_up = next((hypothesis for hypothesis in faults if hypothesis is not best), None)
    if runner_up is not None:
        lines.append(f"next best is {runner_up.name}, which {runner_up.describe()}")
    return lines


def _describe_nearness(healthy: Hypothesis, faults: Sequence[Hypothesis]) -> list[str]:
    """The fault that takes most of the logits' error away, where one does: it may be a part, or another size, of it."""
    near = [fault for fault in faults if fault.typical_error is not None and len(fault.faults) == 1]
    best = min(near, key=lambda fault: fault.typical_error, default=None)
    if best is None or best.typical_error > NEARER * healthy.typical_error:
        return []
    return [
        f"{best.name} takes the typical error of the logits from {healthy.typical_error:.1e} to "
        f"{best.typical_error:.1e}, but not to noise: look there for a part of it, or for another value"
    ]


def describe_origins(result: AlignmentResult) -> list[str]:
    """Which computation chose the wrong tokens, and what came before the first one of each text."""
    total, wrong, before = Counter(), Counter(), Counter()
    for text in result.texts:
        if text.origins is None:
            return []
        positions = set(text.positions(Status.WRONG))
        for position in range(len(text.tokens)):
            place = _place(text.origins.phase(position))
            total[place] += 1
            wrong[place] += position in positions
        if positions and min(positions) > 0:
            is_draft = text.origins.proposer(min(positions) - 1) != "base"
            before["an accepted draft" if is_draft else "a token of the base's own"] += 1
    if not sum(wrong.values()):
        return []
    shares = ", ".join(f"{wrong[place]} of {count} chosen {place}" for place, count in total.items())
    lines = [f"wrong tokens by origin: {shares}"]
    if before:
        lines.append("the first wrong token follows " + ", ".join(f"{name} {n} times" for name, n in before.items()))
    return lines


def _place(phase: str) -> str:
    if phase == "context":
        return "in the context phase"
    return "at the root of a step" if phase == "root" else "at a draft"


def _describe_prompts(search: Search) -> str:
    count, chosen = len(search.observation.prompts), len(search.chosen)
    return "" if chosen == count else f" of the {chosen} prompts that it explains least (of {count})"


def _describe_phase(search: Search) -> list[str]:
    """What the first tokens say about the phase."""
    first = search.healthy.first_tokens
    wrong = int(first.sum())
    if wrong:
        return [f"{wrong} of {len(first)} first tokens are wrong already: {RULED_OUT_FIRST.split(': ')[1]}"]
    if search.healthy.tokens.any():
        what = "tokens and logits" if search.observation.logits is not None else "tokens"
        return [f"the first {what} of all {len(first)} prompts are right: the context phase is right on these prompts"]
    return []
