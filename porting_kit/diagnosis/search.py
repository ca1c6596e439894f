"""The search for the fault: which hypotheses are tried, in which order, and when one is dropped.

Cheap ones first. A hypothesis sees the beginning of the most telling prompt, and the rest only when it explains half of
that. When a prompt's first token is already wrong, faults of the generation phase alone are ruled out; when only steps
are wrong, faults of the heads alone are left. Two faults at once are tried when no single one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from porting_kit.diagnosis.fault import DRAFTS, GENERATION, READING, Fault
from porting_kit.diagnosis.hypotheses import (
    Hypothesis,
    Judgement,
    context_logits,
    count_explained,
    judge,
    replayed_logits,
)
from porting_kit.diagnosis.observation import Observation
from porting_kit.diagnosis.port_state import PortState
from porting_kit.errors import PortingKitError

FOCUS = 3
"""Hypotheses are tried on this many prompts, those that the healthy port explains worst."""

TELLING_TOKENS = 6
"""The beginning of a prompt reaches to so many unexplained tokens."""

SHORTEST_BEGINNING = 8

POORER = 0.8
"""Heads of another base accept at most this share of the tokens per step that the base's own heads would."""

MORE_EMPTY = 0.2
"""And so many more of their steps accept no draft at all."""

RULED_OUT_FIRST = "ruled out: a first token is wrong, which the context phase chose"
RULED_OUT_TEXT = "ruled out: the text is wrong, which heads cannot change"
RULED_OUT_DRAWN = "ruled out: without logits any other text could have been sampled"
RULED_OUT_STEPS = "ruled out: the steps were not observed, and heads do not change the text"

Form = tuple[Fault, int]


class Shelf:
    """Builds the port with faults in it.

    Args:
        state: the healthy port.
        keeps: remember every model that was built; for small ports that are asked about again and again.
    """

    def __init__(self, state: PortState, *, keeps: bool = False) -> None:
        self.state = state
        self._keeps = keeps
        self._models: dict[tuple[tuple[str, int], ...], Any] = {}

    def build(self, *forms: Form) -> Any:
        """The model with these forms of faults, in this order; none for the healthy port."""
        key = tuple((fault.name, form) for fault, form in forms)
        if key in self._models:
            return self._models[key]
        state = self.state
        for fault, form in forms:
            state = fault.forms[form](state)
        model = state.build()
        if self._keeps:
            self._models[key] = model
        return model


@dataclass
class Search:
    """One search over one observation; passes through a model are counted.

    Args:
        shelf: where models come from.
        observation: what was seen.
        seconds: processor time that the search for two faults at once may take.
    """

    shelf: Shelf
    observation: Observation
    seconds: float = 120.0
    context_passes: int = 0
    replays: int = 0
    _wrong_first: dict[str, int] = field(default_factory=dict)

    @property
    def state(self) -> PortState:
        """The healthy port."""
        return self.shelf.state

    @cached_property
    def healthy_model(self) -> Any:
        """The healthy port's model."""
        return self.shelf.build()

    @cached_property
    def healthy_rows(self) -> list[torch.Tensor]:
        """Its logits at every emitted token of every prompt."""
        return self._context(self.healthy_model, self.observation)

    @cached_property
    def chosen(self) -> list[int]:
        """The prompts that say most: those of which the healthy port explains least, the worst first."""
        counts = []
        for index in range(len(self.observation.prompts)):
            one = judge(self.state, self.observation.select([index]), [self.healthy_rows[index]])
            counts.append(one.unexplained)
        lengths = [len(prompt) for prompt in self.observation.prompts]
        order = sorted(range(len(counts)), key=lambda index: (-counts[index], -lengths[index]))
        return order[:FOCUS]

    @cached_property
    def focus(self) -> Observation:
        """The observation of those prompts."""
        return self.observation.select(self.chosen)

    @cached_property
    def beginning(self) -> Observation:
        """The beginning of the first of them."""
        first = self.observation.select(self.chosen[:1])
        flags = judge(self.state, first, [self.healthy_rows[self.chosen[0]]]).tokens.nonzero()[:, 0]
        reached = int(flags[min(TELLING_TOKENS, len(flags)) - 1]) + 1 if len(flags) else 0
        return first.cut(max(reached, SHORTEST_BEGINNING))

    @cached_property
    def healthy(self) -> Judgement:
        """The healthy port's judgement of the focus: its context phase, and its steps where steps were seen."""
        rows = [self.healthy_rows[index] for index in self.chosen]
        return judge(self.state, self.focus, rows, self.healthy_lengths)

    @cached_property
    def healthy_lengths(self) -> Any:
        """Its accepted lengths; None when no steps were seen."""
        return None if self.focus.accepted_lengths is None else self._replay(self.healthy_model, self.focus)[1]

    @cached_property
    def healthy_beginning(self) -> Judgement:
        """The same of the beginning."""
        return judge(self.state, self.beginning, [self.healthy_rows[self.chosen[0]][: len(self.beginning.tokens[0])]])

    @cached_property
    def replays_as_observed(self) -> bool:
        """The healthy port's own generation phase explains what its context phase does not."""
        rows, lengths = self._replay(self.healthy_model, self.focus)
        return judge(self.state, self.focus, rows, lengths).unexplained == 0

    def try_single(self, fault: Fault) -> Hypothesis:
        """The best of a fault's forms."""
        if (reason := self._rule_out(fault)) is not None:
            return Hypothesis((fault,), error=reason)
        if fault.phase == READING:
            return self._guard((fault,), lambda: self._try_reading(fault))
        if fault.accepts_fewer:
            return self._try_fewer(fault)
        found = [
            self._guard((fault,), lambda form=form: replace(self.try_forms((fault, form)), form=form))
            for form in range(len(fault.forms))
        ]
        return min(found, key=lambda hypothesis: hypothesis.order)

    def try_forms(self, *forms: Form) -> Hypothesis:
        """One combination: the beginning first, then the focus when half of the beginning is explained."""
        faults = tuple(fault for fault, _ in forms)
        model = self.shelf.build(*forms)
        if self.healthy_beginning.tokens.any():
            first = self._view(model, faults, self.beginning)
            hypothesis = count_explained(first, self.healthy_beginning)
            if 2 * hypothesis.explained < int(self.healthy_beginning.tokens.sum()):
                return replace(hypothesis, faults=faults, prompts=0)
        return replace(count_explained(self._view(model, faults, self.focus), self.healthy), faults=faults)

    def try_pair(self, pair: tuple[Fault, Fault]) -> Hypothesis:
        """Two faults at once, each in its usual form."""
        return self._guard(pair, lambda: self.try_forms((pair[0], 0), (pair[1], 0)))

    def count_wrong_first(self, fault: Fault) -> int:
        """First tokens, of all prompts, that a fault of every phase does not explain: one pass over the prompts."""
        if fault.name not in self._wrong_first:
            first = self.observation.cut(1)
            rows = self._context(self.shelf.build((fault, 0)), first)
            self._wrong_first[fault.name] = judge(self.state, first, rows).unexplained
        return self._wrong_first[fault.name]

    def predicted_logits(self, *forms: Form) -> tuple[list[torch.Tensor], Any]:
        """What a hypothesis says of the focus, with the steps when it was replayed."""
        faults = tuple(fault for fault, _ in forms)
        model = self.shelf.build(*forms)
        if self._needs_replay(faults):
            return self._replay(model, self.focus)
        return self._context(model, self.focus), None

    # ------------------------------------------------------------------------------------------------- one model

    def _view(self, model: Any, faults: Sequence[Fault], observation: Observation) -> Judgement:
        """Context pass, or replay for a fault of the generation phase; steps only for what fits so far."""
        if self._needs_replay(faults):
            rows, lengths = self._replay(model, observation)
            return judge(self.state, observation, rows, lengths)
        found = judge(self.state, observation, self._context(model, observation))
        is_hopeful = 2 * found.figures.unexplained_tokens <= len(found.tokens)
        if observation.accepted_lengths is None or not is_hopeful:
            return found
        rows, lengths = self._replay(model, observation)
        return judge(self.state, observation, rows, lengths)

    @staticmethod
    def _needs_replay(faults: Sequence[Fault]) -> bool:
        return any(fault.phase in (GENERATION, DRAFTS) or fault.follows_length for fault in faults)

    def _try_reading(self, fault: Fault) -> Hypothesis:
        """A fault of the comparison: the healthy port, the observation read in another way."""
        rows = [self.healthy_rows[index] for index in self.chosen]
        rereads = [reread for reread in (fault.reread, *fault.rereads) if reread is not None]
        tried = [self._try_reread(fault, reread, rows) for reread in rereads]
        rescores = [(rescore, None) for rescore in (fault.rescore, *fault.rescores) if rescore is not None]
        estimates = [estimate(self.healthy_rows, self.observation) for estimate in fault.estimates]
        rescores += [(estimate.rescore, estimate.words) for estimate in estimates if estimate is not None]
        for form, (rescore, words) in enumerate(rescores):
            found = judge(self.state, self.focus, rows, self.healthy_lengths, rescore=rescore)
            tried.append(replace(count_explained(found, self.healthy), faults=(fault,), form=form, detail=words))
        if not tried:
            return Hypothesis((fault,), error="the choices ask for no such penalty")
        return min(tried, key=lambda hypothesis: hypothesis.order)

    def _try_reread(self, fault: Fault, reread: Callable[..., Observation], rows: list[torch.Tensor]) -> Hypothesis:
        """The healthy port on what it would have been given; other prompts are tried on a beginning first."""
        whole = reread(self.state, self.observation)
        again = whole.select(self.chosen)
        if list(map(list, again.prompts)) == list(map(list, self.focus.prompts)):
            found = judge(self.state, again, rows, self.healthy_lengths)
            return replace(count_explained(found, self.healthy), faults=(fault,))
        first = whole.select(self.chosen[:1]).cut(len(self.beginning.tokens[0]))
        if self.healthy_beginning.tokens.any() and list(first.prompts[0]) != list(self.beginning.prompts[0]):
            found = count_explained(self._view(self.healthy_model, (fault,), first), self.healthy_beginning)
            if 2 * found.explained < int(self.healthy_beginning.tokens.sum()):
                return replace(found, faults=(fault,), prompts=0)
        found = self._view(self.healthy_model, (fault,), again)
        return replace(count_explained(found, self.healthy), faults=(fault,))

    def _try_fewer(self, fault: Fault) -> Hypothesis:
        """A fault that makes drafts poor in no way that could be computed."""
        observed = [length for row in self.focus.accepted_lengths for length in row]
        healthy = [length for row in self.healthy_lengths for length in row]
        is_poorer = sum(observed) / len(observed) <= POORER * sum(healthy) / len(healthy)
        # A smaller tree gives shorter steps too, but not more that accept nothing.
        is_poorer &= observed.count(1) / len(observed) >= healthy.count(1) / len(healthy) + MORE_EMPTY
        steps = torch.zeros_like(self.healthy.steps) if is_poorer else self.healthy.steps
        figures = replace(self.healthy.figures, unexplained_steps=int(steps.sum()))
        found = replace(self.healthy, steps=steps, figures=figures)
        return replace(count_explained(found, self.healthy), faults=(fault,))

    def _rule_out(self, fault: Fault) -> str | None:
        if fault.phase in (GENERATION, DRAFTS) and bool(self.healthy.first_tokens.any()):
            return RULED_OUT_FIRST
        if fault.phase == READING and fault.is_broad and self.observation.logits is None:
            return RULED_OUT_DRAWN
        if fault.phase == DRAFTS and bool(self.healthy.tokens.any()):
            return RULED_OUT_TEXT
        if fault.phase == DRAFTS and self.focus.accepted_lengths is None:
            return RULED_OUT_STEPS
        return None

    def _guard(self, faults: tuple[Fault, ...], attempt: Callable[[], Hypothesis]) -> Hypothesis:
        """A hypothesis that cannot run is listed with the reason."""
        try:
            return attempt()
        except (PortingKitError, RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return Hypothesis(faults, error=reason[0])

    def _context(self, model: Any, observation: Observation) -> list[torch.Tensor]:
        self.context_passes += 1
        return context_logits(model, observation)

    def _replay(self, model: Any, observation: Observation) -> tuple[list[torch.Tensor], Any]:
        self.replays += 1
        return replayed_logits(model, self.state, observation)
