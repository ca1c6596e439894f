"""Trying hypotheses: the port with one fault, made to emit what was observed, and what that leaves unexplained.

Under the right hypothesis every emitted token is the model's own best token, within noise, every step accepts as many
as was observed, and the logits, where there are any, are the observed ones. One wrong token does not disturb the
judgement of the next, because the history is the observed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.alignment.gates import ERROR_FACTOR
from porting_kit.alignment.noise import relative_errors
from porting_kit.alignment.oracle import token_margins
from porting_kit.alignment.result import AlignmentResult
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortingKitError
from porting_kit.medusa.decoding import replay

NO_FAULT = "no fault"
NEAR_TIE_SHARE = 0.05
"""More near-ties than this are no noise: a model without an opinion would explain everything."""

FOCUS = 3
"""Hypotheses are tried on this many prompts, those that the healthy port explains worst."""


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
        unexplained_tokens: emitted tokens that are not the hypothetical model's best, or that other logits chose,
            beyond noise.
        unexplained_steps: steps that would have accepted another number of tokens; 0 when not observed.
        explained: of the tokens and steps that the healthy port does not explain, how many this one does.
        logit_error: worst relative error against the observed logits; None without them.
        deficit: sum of the logits by which emitted tokens fall short.
        error: why it could not be tried; then the counts mean nothing.
        prompts: prompts it was tried on; a hopeless one is dropped after the first.
    """

    fault: Fault | None
    unexplained_tokens: int = 0
    unexplained_steps: int = 0
    explained: int = 0
    logit_error: float | None = None
    deficit: float = 0.0
    error: str | None = None
    prompts: int = 0

    @property
    def name(self) -> str:
        """The fault's name."""
        return NO_FAULT if self.fault is None else self.fault.name

    @property
    def unexplained(self) -> int:
        """Tokens and steps together."""
        return self.unexplained_tokens + self.unexplained_steps


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


def try_faults(
    state: PortState, faults: Sequence[Fault], observation: Observation, healthy_flags: torch.Tensor
) -> list[Hypothesis]:
    """Every fault on the most telling prompt, and those that explain half of it on the others too."""
    first = observation.select([0])
    first_flags = try_fault(state, None, first)[0]
    found = []
    for fault in faults:
        flags, hypothesis = try_fault(state, fault, first)
        hypothesis = _count_explained(hypothesis, flags, first_flags)
        is_hopeless = hypothesis.error is not None or 2 * hypothesis.explained < int(first_flags.sum())
        if is_hopeless or len(observation.prompts) == 1:
            found.append(replace(hypothesis, prompts=1))
        else:
            flags, hypothesis = try_fault(state, fault, observation)
            found.append(_count_explained(hypothesis, flags, healthy_flags))
    return found


def focus(state: PortState, observation: Observation) -> Observation:
    """The prompts that say most: those of which the healthy port explains least, the worst first."""
    model = state.build()
    indices = range(len(observation.prompts))
    counts = [int(_judge(model, state, observation.select([index]))[0].sum()) for index in indices]
    return observation.select(sorted(indices, key=lambda index: -counts[index])[:FOCUS])


def try_fault(state: PortState, fault: Fault | None, observation: Observation) -> tuple[torch.Tensor, Hypothesis]:
    """Run one hypothesis; bool [tokens + steps], true where it does not explain, and the figures."""
    try:
        model = (state if fault is None else fault.apply(state)).build()
        flags, figures = _judge(model, state, observation)
        return flags, replace(figures, fault=fault, prompts=len(observation.prompts))
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
        errors = torch.cat([relative_errors(ours.cpu(), theirs.cpu()) for ours, theirs in observed])
        logit_error = float(errors.max())
        if observation.logits_noise is not None:
            wrong_tokens = wrong_tokens | ~(errors <= observation.logits_noise)
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
