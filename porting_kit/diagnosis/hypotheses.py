"""Trying a hypothesis: what the port with one fault says about the observed text, and what that leaves unexplained.

The observed text is given to the model, so one wrong token does not disturb the judgement of the next. A fault that
shows in every phase costs one context pass over prompt and text; one that shows in the generation phase only is
replayed step by step, with the drafts that its own heads propose. Under the right hypothesis every emitted token is
the model's own best token within noise, every step accepts as many as was observed, and the logits, where there are
any, are the observed ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.noise import relative_errors
from porting_kit.alignment.oracle import token_margins
from porting_kit.diagnosis.choice_faults import Rescore
from porting_kit.diagnosis.fault import Fault
from porting_kit.diagnosis.observation import PADDED_TO, Observation
from porting_kit.diagnosis.port_state import PortState
from porting_kit.medusa.decoding import replay

NO_FAULT = "no fault"


@dataclass(frozen=True)
class Hypothesis:
    """How well one fault, or two at once, explain an observation.

    Args:
        faults: none for the healthy port.
        unexplained_tokens: emitted tokens that are not the hypothetical model's best, or that other logits chose,
            beyond noise.
        unexplained_steps: steps that would have accepted another number of tokens; 0 when not observed.
        unexplained_ends: texts that end where they should not.
        explained: of what the healthy port does not explain, how much this one does.
        explained_ends: of those, steps and ends of texts, which are counted exactly.
        out_of: what the healthy port does not explain of the prompts, or the beginning, that it was tried on.
        logit_error: worst relative error against the observed logits; None without them.
        typical_error: the median one.
        deficit: sum of the logits by which emitted tokens fall short.
        error: why it could not be tried, or is ruled out; then the counts mean nothing.
        prompts: prompts it was tried on; a hopeless one is dropped after the beginning of the first, which counts 0.
        form: which of the fault's forms fitted best.
        detail: a value that was read off the observation, in words.
    """

    faults: tuple[Fault, ...] = ()
    unexplained_tokens: int = 0
    unexplained_steps: int = 0
    unexplained_ends: int = 0
    explained: int = 0
    explained_ends: int = 0
    out_of: int = 0
    logit_error: float | None = None
    typical_error: float | None = None
    deficit: float = 0.0
    error: str | None = None
    prompts: int = 0
    form: int = 0
    detail: str | None = None

    @property
    def name(self) -> str:
        """The fault's name; two joined by a plus."""
        return " + ".join(fault.name for fault in self.faults) or NO_FAULT

    @property
    def fault(self) -> Fault | None:
        """The fault, None for the healthy port; the first of two."""
        return self.faults[0] if self.faults else None

    @property
    def unexplained(self) -> int:
        """Tokens, steps and ends together."""
        return self.unexplained_tokens + self.unexplained_steps + self.unexplained_ends

    def describe(self) -> str:
        """What it explains, and what it makes wrong, in words."""
        spoilt = self.unexplained - (self.out_of - self.explained)
        text = f"explains {self.explained} of the {self.out_of}"
        text += f", and {spoilt} that the healthy port explains are wrong with it" if spoilt > 0 else ""
        return text if self.prompts or self.error else f"{text} at the beginning of one prompt, where it was given up"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key, the best first."""
        error = self.logit_error if self.logit_error is not None else 0.0
        is_ruled_out = self.error is not None
        size = (self.unexplained, self.is_broad, len(self.faults))
        return (is_ruled_out, -self.prompts, *size, error, self.deficit)

    @property
    def is_broad(self) -> bool:
        """It would explain much that is something else."""
        return any(fault.is_broad for fault in self.faults)


@dataclass(frozen=True)
class Judgement:
    """One model's view of an observation.

    Args:
        tokens: bool, true for each emitted token that it does not explain.
        steps: the same for each observed step; empty when steps were not looked at.
        ends: the same for each text's end.
        first_tokens: of `tokens`, the first one of each prompt.
        figures: the counts.
    """

    tokens: torch.Tensor
    steps: torch.Tensor
    ends: torch.Tensor
    first_tokens: torch.Tensor
    figures: Hypothesis

    @property
    def unexplained(self) -> int:
        """Tokens, steps and ends together."""
        return self.figures.unexplained

    @property
    def observed(self) -> int:
        """Tokens and steps that were looked at, and the ends of texts where one is wrong."""
        return len(self.tokens) + len(self.steps) + (len(self.ends) if self.ends.any() else 0)


def context_logits(model: Any, observation: Observation) -> list[torch.Tensor]:
    """What the model's context phase thinks at every emitted token, [n, V] per prompt: one pass."""
    limit = int(model.config["vocab_size"])
    texts = [
        [*prompt, *(token if 0 <= token < limit else 0 for token in row[:-1])]
        for prompt, row in zip(observation.prompts, observation.tokens, strict=True)
    ]
    rows = ContextOracle(model).logits(texts)
    return [logits[len(prompt) - 1 :] for logits, prompt in zip(rows, observation.prompts, strict=True)]


def replayed_logits(model: Any, state: PortState, observation: Observation) -> tuple[list[torch.Tensor], Any]:
    """The same of the generation phase, step by step, and the accepted lengths of the steps."""
    limit = int(model.config["vocab_size"])
    tokens = [[token if 0 <= token < limit else 0 for token in row] for row in observation.tokens]
    replayed = replay(model, observation.prompts, tokens, state.tree)
    return [logits[:, :limit] for logits in replayed.logits], replayed.accepted_lengths


def judge(
    state: PortState,
    observation: Observation,
    rows: Sequence[torch.Tensor],
    accepted_lengths: Sequence[Sequence[int]] | None = None,
    rescore: Rescore | None = None,
) -> Judgement:
    """Compare what a model thinks with what was seen.

    Args:
        state: the healthy port.
        observation: what was seen.
        rows: [n, V] per prompt, the model's logits at every emitted token.
        accepted_lengths: of the model's steps; None leaves steps out of the judgement.
        rescore: what chose the tokens, when not the logits themselves.
    """
    tokens = torch.cat([torch.as_tensor(row) for row in observation.tokens])
    logits = [row.double().cpu() for row in rows]
    chosen = logits
    if rescore is not None:
        pairs = zip(logits, observation.prompts, observation.tokens, strict=True)
        chosen = [rescore(state, row, prompt, emitted) for row, prompt, emitted in pairs]
    margins, preferred = token_margins(torch.cat(chosen), tokens)
    wrong = ~(margins >= -observation.tolerance)
    near_ties = ~wrong & (preferred != tokens)
    # Where logits were observed they say what is within noise, and there is no need to guess.
    if observation.logits is None and not _are_noise(int(near_ties.sum()), margins, observation.tolerance):
        wrong = wrong | near_ties
    logit_error = typical_error = None
    if observation.logits is not None:
        pairs = zip(logits, observation.logits, strict=True)
        errors = torch.cat([relative_errors(ours, theirs.cpu()) for ours, theirs in pairs])
        logit_error = float(errors.nan_to_num(torch.inf).max())
        typical_error = float(errors.nan_to_num(torch.inf).median())
        if observation.logits_noise is not None:
            wrong = wrong | ~(errors <= observation.logits_noise)
    if observation.allows_padding:
        wrong = _forgive_padding(wrong, observation, int(state.config["vocab_size"]))
    starts = torch.tensor([0, *(len(row) for row in observation.tokens)]).cumsum(0)[:-1]
    steps = compare_steps(observation, accepted_lengths)
    ends = torch.tensor([observation.has_wrong_length(index) for index in range(len(observation.tokens))])
    figures = Hypothesis(
        unexplained_tokens=int(wrong.sum()),
        unexplained_steps=int(steps.sum()),
        unexplained_ends=int(ends.sum()),
        logit_error=logit_error,
        typical_error=typical_error,
        deficit=float(-margins.clamp(min=-1e9, max=0).sum()),
        prompts=len(observation.prompts),
    )
    return Judgement(wrong, steps, ends, wrong[starts], figures)


def _are_noise(near_ties: int, margins: torch.Tensor, tolerance: float) -> bool:
    """Whether rounding can have made so many near-ties: where two tokens are that close it picks the other one every
    second time, within two standard deviations. A model without an opinion would explain everything otherwise."""
    close = int((margins.abs() <= tolerance).sum())
    return near_ties <= close / 2 + math.sqrt(close)


def compare_steps(observation: Observation, again: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """bool, one per observed step: the model has no step that starts at this token and accepts as many."""
    if observation.accepted_lengths is None or again is None:
        return torch.zeros(0, dtype=torch.bool)
    flags = []
    for tokens, observed, lengths in zip(observation.tokens, observation.accepted_lengths, again, strict=True):
        starts, root = {}, 1
        for length in lengths:
            starts[root] = min(length, len(tokens) - root)
            root += length
        root = 1
        for length in observed:
            flags.append(starts.get(root) != min(length, len(tokens) - root))
            root += length
    return torch.tensor(flags, dtype=torch.bool)


def count_explained(judgement: Judgement, healthy: Judgement) -> Hypothesis:
    """The figures with what this model explains and the healthy port does not."""
    pairs = [(healthy.ends, judgement.ends)]
    if len(healthy.steps) == len(judgement.steps):
        pairs.append((healthy.steps, judgement.steps))
    exact = sum(int((before & ~after).sum()) for before, after in pairs)
    tokens = int((healthy.tokens & ~judgement.tokens).sum())
    return replace(judgement.figures, explained=tokens + exact, explained_ends=exact, out_of=healthy.unexplained)


def _forgive_padding(wrong: torch.Tensor, observation: Observation, vocab_size: int) -> torch.Tensor:
    """An id in the padding is explained; with it in the history nothing behind it can be judged."""
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    flags, start = wrong.clone(), 0
    for row in observation.tokens:
        first = next((at for at, token in enumerate(row) if vocab_size <= token < padded), None)
        if first is not None:
            flags[start + first : start + len(row)] = False
        start += len(row)
    return flags
