"""What a verification step costs by its tokens, and what a tree is then worth: predicted speed-up and an honest word.

A step of B requests with N nodes each is B x N tokens through the model. Costs are measured times, interpolated between
the sizes that were measured; beyond the largest one nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from porting_kit.errors import TreeError
from porting_kit.whole_files import read_json

WORTH_IT = 1.1
"""Below this predicted speed-up the sentence says that Medusa is not worth its upkeep."""

MAX_MILLISECONDS = 1e9
"""Above this a cost is a mistake; it also keeps out numbers that no float holds."""


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step by its tokens, sizes ascending; no size costs more than a larger one."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def from_measured(cls, times: Mapping[int, float]) -> StepCosts:
        """Costs from the fastest time of each size.

        Other work on a machine only adds to a time, and a larger step does all that a smaller one does. So where a
        larger step was timed faster, the smaller one's time is too long by other work: it takes the larger one's.

        Args:
            times: tokens of a step -> milliseconds.
        """
        sizes = sorted(times, reverse=True)
        ms = accumulate((times[size] for size in sizes), min)
        return cls(tuple(reversed(sizes)), tuple(reversed(tuple(ms))))

    def cost(self, tokens: int) -> float | None:
        """Milliseconds of a step of `tokens` tokens; None beyond the largest measured size."""
        for (low, low_ms), (high, high_ms) in zip(
            zip(self.tokens, self.ms, strict=True), zip(self.tokens[1:], self.ms[1:], strict=True), strict=False
        ):
            if low <= tokens <= high:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        return self.ms[0] if tokens == self.tokens[0] else None


def read_step_costs(source: str | Path | Mapping[object, object]) -> StepCosts:
    """Costs from a mapping, or from a JSON file that holds one: {"1": 10.0, "8": 11.2, "64": 19.0}.

    Raises:
        TreeError: unreadable, no size 1, sizes that are no whole numbers, times that are no positive numbers, or a
            time below that of a smaller size.
    """
    where = None
    if not isinstance(source, Mapping):
        where = Path(source)
        try:
            source = read_json(where)
        except (OSError, ValueError) as error:
            raise TreeError(
                "the step costs cannot be read",
                expected='a JSON file such as {"1": 10.0, "8": 11.2, "64": 19.0}',
                found=error,
                where=where,
                next_step="write such a file, or measure: --measure-costs",
            ) from error
    if not isinstance(source, Mapping):
        raise TreeError(
            "the step costs are no mapping of tokens to milliseconds",
            expected='{"1": 10.0, "8": 11.2, "64": 19.0}',
            found=type(source).__name__,
            where=where,
            next_step="write such a file, or measure: --measure-costs",
        )
    costs: dict[int, float] = {}
    wrong = []
    for size, value in source.items():
        number = int(size) if isinstance(size, str) and size.isdecimal() else size
        is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_MILLISECONDS
        if type(number) is not int or number < 1 or not is_time:
            wrong.append(f"{size!r}: {value!r}")
        else:
            costs[number] = float(value)
    if wrong or 1 not in costs or len(costs) < 2:
        raise TreeError(
            "the step costs cannot be used",
            expected="positive milliseconds for 1 token and for at least one larger step",
            found=f"sizes {sorted(costs)}",
            where=where,
            items=wrong,
            next_step="measure with porting-kit heads tree --measure-costs",
        )
    sizes = sorted(costs)
    falling = [
        f"size {small}: {costs[small]} ms, size {large}: {costs[large]} ms"
        for small, large in pairwise(sizes)
        if costs[large] < costs[small]
    ]
    if falling:
        raise TreeError(
            "the step costs fall where steps grow, which would make a tree faster than its tokens a step allow",
            expected="no less milliseconds for a larger step, which does all that a smaller one does",
            found=f"{len(falling)} of {len(sizes) - 1} times below the one before",
            where=where,
            items=falling,
            next_step="time these sizes again, in turn, and write down the fastest of several steps of each",
        )
    return StepCosts(tuple(sizes), tuple(costs[size] for size in sizes))


def require_costs(costs: StepCosts, nodes: int, batch: int) -> None:
    """Refuse costs that say nothing about a greedy step or about one with a tree.

    Args:
        costs: the costs.
        nodes: N of the smallest tree that is asked about.
        batch: B.

    Raises:
        TreeError: no cost of B or of B x N tokens.
    """
    if costs.cost(batch) is None or costs.cost(nodes * batch) is None:
        raise TreeError(
            f"the step costs do not reach a tree at batch {batch}",
            expected=f"size {batch}, a greedy step, and size {nodes * batch}, a step with {nodes} nodes a request",
            found=f"sizes {costs.tokens[0]} to {costs.tokens[-1]}",
            next_step=f"add such sizes, or measure with porting-kit heads tree --measure-costs --batch {batch}",
        )


@dataclass(frozen=True)
class TreeWorth:
    """What a tree gives at a batch size.

    Args:
        nodes: N.
        tokens_per_step: predicted.
        step_ms, greedy_ms: a step with and without the tree; None when not measured.
        speed_up: predicted tokens per second over plain greedy; None without costs.
    """

    nodes: int
    tokens_per_step: float
    step_ms: float | None
    greedy_ms: float | None

    @property
    def speed_up(self) -> float | None:
        """Tokens per second over plain greedy."""
        if self.step_ms is None or self.greedy_ms is None:
            return None
        return self.tokens_per_step * self.greedy_ms / self.step_ms


def rate_tree(nodes: int, tokens_per_step: float, costs: StepCosts | None, batch: int) -> TreeWorth:
    """The worth of a tree of `nodes` nodes for `batch` requests at a time."""
    if costs is None:
        return TreeWorth(nodes, tokens_per_step, None, None)
    return TreeWorth(nodes, tokens_per_step, costs.cost(nodes * batch), costs.cost(batch))


def word_worth(worth: TreeWorth, batch: int) -> str:
    """The honest sentence."""
    gain = worth.speed_up
    if gain is None:
        return (
            f"{worth.tokens_per_step:.2f} tokens a step with {worth.nodes} nodes; without step costs nothing is said "
            "about speed"
        )
    text = f"expected gain {gain:.2f}x at batch {batch}: {worth.tokens_per_step:.2f} tokens a step of "
    text += f"{worth.step_ms:.2f} ms against 1 in {worth.greedy_ms:.2f} ms"
    return text if gain >= WORTH_IT else f"{text}: not worth it"
