"""Which release to pin for a shape, and why the others were not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from porting_kit.errors import PortFileError
from porting_kit.releases.facts import ReleaseFacts, find_release_facts, load_release_ranges
from porting_kit.releases.kernels import GateResult, evaluate_gates, kernel_profile
from porting_kit.releases.shape import AttentionShape


@dataclass(frozen=True)
class PinCandidate:
    """One release range and how a shape fares there.

    Args:
        facts: the range.
        refused: gates at which the engine stops.
        silent: gates nobody watches, where the result is wrong.
    """

    facts: ReleaseFacts
    refused: tuple[GateResult, ...]
    silent: tuple[GateResult, ...]

    @property
    def inferred(self) -> bool:
        """Whether part of the range's kernel facts was concluded instead of read."""
        return bool(self.facts.kernel.inferred) or not self.facts.build.complete

    @property
    def rank(self) -> tuple[int, int, bool]:
        """Smaller is better: refusals first, then silent faults, then how sure the facts are."""
        return (len(self.refused), len(self.silent), self.inferred)

    def describe(self) -> str:
        """One sentence for a table."""
        if self.refused:
            gate = self.refused[0]
            return f"{self.facts.name}: refused, {gate.name} {gate.value} (wants {gate.expected})"
        if self.silent:
            return f"{self.facts.name}: runs, and is wrong without a message: {self.silent[0].name}"
        return f"{self.facts.name}: every gate passes" + (", partly inferred" if self.inferred else "")


@dataclass(frozen=True)
class Pin:
    """The release range to build with.

    Args:
        candidate: the chosen one.
        reason: one sentence.
        others: the other candidates, best first.
    """

    candidate: PinCandidate
    reason: str
    others: tuple[PinCandidate, ...]

    @property
    def usable(self) -> bool:
        """Whether every gate passes there."""
        return not (self.candidate.refused or self.candidate.silent)


def pin_release(shape: AttentionShape, available: Sequence[str] = ()) -> Pin:
    """Choose the release range in which a (fitted) shape meets the fewest refusals and silent faults.

    Among equals, facts that were read win over inferred ones, then the newest range wins.

    Args:
        shape: the shape the engine will have.
        available: releases to choose from; every known range when empty.

    Raises:
        PortFileError: an available release outside the known ranges.
    """
    ranges = tuple(find_release_facts(release) for release in available) or load_release_ranges()
    candidates = [_judge(shape, facts) for facts in dict.fromkeys(ranges)]
    if not candidates:
        raise PortFileError(
            "no release to choose from",
            expected="at least one release",
            found="none",
            next_step="name a release, or leave the list empty for every known one",
        )
    candidates.reverse()  # newest first; the sort is stable
    candidates.sort(key=lambda candidate: candidate.rank)
    best = candidates[0]
    others = tuple(candidates[1:])
    equals = sum(candidate.rank == best.rank for candidate in others)
    reason = best.describe()
    if equals:
        reason += f"; the newest of {equals + 1} such ranges"
    return Pin(best, reason, others)


def _judge(shape: AttentionShape, facts: ReleaseFacts) -> PinCandidate:
    results = evaluate_gates(shape, kernel_profile(f"release:{facts.since}"))
    return PinCandidate(
        facts,
        tuple(result for result in results if result.verdict == "refused"),
        tuple(result for result in results if result.verdict == "silent"),
    )
