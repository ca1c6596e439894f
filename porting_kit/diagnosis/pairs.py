"""Two faults at once, where they are separable: tried when no single fault explains what was seen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations

from porting_kit.diagnosis.fault import EVERY, GENERATION, Fault
from porting_kit.diagnosis.hypotheses import Hypothesis
from porting_kit.diagnosis.search import RULED_OUT_FIRST, Search

FEWEST = 6
"""Fewer unexplained tokens than this could be matched by one of a thousand pairs by chance."""

NEAREST = 4
"""Faults of every phase that are joined with faults of the generation phase, when a first token is wrong: those that
explain the first tokens best, which the context phase alone has chosen."""


def try_pairs(search: Search, singles: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Pairs that explain more than half, best first; stops at the first that leaves nothing, or when time is up.

    Args:
        search: the search, whose single faults did not fit.
        singles: what came of them.
    """
    if int(search.healthy.tokens.sum()) < FEWEST:
        return []
    deadline = time.process_time() + search.seconds
    found = []
    for pair in _in_order(search, singles):
        if time.process_time() > deadline:
            break
        hypothesis = search.try_pair(pair)
        if hypothesis.error is None and hypothesis.prompts:
            found.append(hypothesis)
            if hypothesis.unexplained == 0:
                break
    return sorted(found, key=lambda hypothesis: hypothesis.order)


def _in_order(search: Search, singles: Sequence[Hypothesis]) -> Iterator[tuple[Fault, Fault]]:
    """The most promising first: by what each explains alone."""
    ranked = sorted(singles, key=lambda single: (-single.explained, single.order))
    usable = [single for single in ranked if single.fault and (not single.error or single.error == RULED_OUT_FIRST)]
    every = [single.fault for single in usable if single.fault.phase == EVERY]
    later = [single.fault for single in usable if single.fault.phase == GENERATION]
    if not search.healthy.first_tokens.any():
        yield from sorted(combinations(every + later, 2), key=lambda pair: _rank(pair, every + later))
        return
    nearest = sorted(every, key=search.count_wrong_first)[:NEAREST]
    yield from ((first, second) for first in nearest if not search.count_wrong_first(first) for second in later)
    yield from sorted(combinations(every, 2), key=lambda pair: _rank(pair, every))


def _rank(pair: tuple[Fault, Fault], order: Sequence[Fault]) -> int:
    places = [order.index(fault) for fault in pair]
    return sum(places) + min(places)
