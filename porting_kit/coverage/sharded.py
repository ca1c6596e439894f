"""A row once more on several ranks: the same checkpoint cut for them, run through the tree's own layers, and compared.

Each run is judged as the row on one rank is, against Hugging Face within the same bounds, and every rank must say the
same. What cannot be cut is refused with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porting_kit.coverage.comparison import compare_model
from porting_kit.coverage.precision import Bounds
from porting_kit.coverage.rank_group import RankGroup, RankStopped
from porting_kit.coverage.row import ShardedRun
from porting_kit.errors import BaseModelError, ConversionError, PortingKitError


@dataclass(frozen=True)
class Sharding:
    """How many ranks a model is cut for."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.pp_size

    @property
    def name(self) -> str:
        """`tp 2`, `pp 2`, or both."""
        sizes = (("tp", self.tp_size), ("pp", self.pp_size))
        return ", ".join(f"{kind} {size}" for kind, size in sizes if size > 1)


@dataclass(frozen=True)
class Subject:
    """What a row compares, as the run on one rank left it.

    Args:
        convert: sharding -> (config, each rank's tensors).
        source, class_name: the patched module.
        reference: computes what the library computes.
        prompts: token ids.
        tensors: of the checkpoint on one rank, for the heads.
        bounds: as on one rank.
        compare_tokens: model -> (Medusa's tokens are the base's, mean accepted length).
    """

    convert: Callable[[Sharding], tuple[dict[str, Any], Sequence[dict[str, Any]]]]
    source: str
    class_name: str
    reference: Any
    prompts: Sequence[Sequence[int]]
    tensors: dict[str, Any]
    bounds: Bounds
    compare_tokens: Callable[[Any], tuple[bool, float]]


@dataclass
class RankGroups:
    """The groups of ranks of one tree, started when a row first needs them.

    Args:
        tree_root: folder of the tree; its code is executed in every rank's process.
        shardings: what every row is cut for.
    """

    tree_root: Path
    shardings: Sequence[Sharding] = ()
    _groups: dict[int, RankGroup] = field(default_factory=dict)

    def measure(self, subject: Subject) -> tuple[ShardedRun, ...]:
        """The row's runs, one for each sharding."""
        return tuple(self._measure_one(sharding, subject) for sharding in self.shardings)

    def _measure_one(self, sharding: Sharding, subject: Subject) -> ShardedRun:
        started, found, status, reason = time.perf_counter(), {}, "aligned", None
        try:
            config, ranks = subject.convert(sharding)
        except (ConversionError, BaseModelError) as error:
            status, reason = refuse_or_fail(error), describe_refusal(error)
        else:
            try:
                group = self._groups.setdefault(sharding.world_size, RankGroup(self.tree_root, sharding.world_size))
                model = group.build_model(config, ranks, subject.source, subject.class_name)
                reason = _compare(model, subject, found)
            except (RankStopped, PortingKitError) as error:
                reason = str(error).splitlines()[0]
            status = "failed" if reason else "aligned"
        return ShardedRun(sharding.name, status, reason=reason, seconds=time.perf_counter() - started, **found)

    def close(self) -> None:
        """End every process."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def _compare(model: Any, subject: Subject, found: dict[str, Any]) -> str | None:
    """Fill `found`; why the run fails, None when it does not."""
    errors = compare_model(model, subject.reference, subject.prompts, subject.tensors)
    found |= {"context_error": errors.context, "tree_error": errors.tree, "heads_error": errors.heads}
    bounds = subject.bounds
    for what, error, bound in (
        ("context logits", errors.context, bounds.logits),
        ("logits at the nodes of a tree", errors.tree, bounds.logits),
        ("logits of the Medusa heads", errors.heads, bounds.heads),
    ):
        if not error <= bound:
            return f"{what} differ from Hugging Face by {error:.2g} of the largest logit (bound {bound:.2g})"
    found["tokens_equal"], per_step = subject.compare_tokens(model)
    if not found["tokens_equal"]:
        return "Medusa's tokens are not the base's greedy tokens"
    return None if per_step > 1 else "no draft was ever accepted, so acceptance was not tested"


def refuse_or_fail(error: PortingKitError) -> str:
    """A model that does not divide, or a release that cannot, is refused; any other fault of a conversion is one."""
    from porting_kit.conversion import UnevenRanks

    return "refused" if isinstance(error, (UnevenRanks, BaseModelError)) else "failed"


def describe_refusal(error: PortingKitError) -> str:
    """Subject, and what was found or from when on it works."""
    said = error.found if not isinstance(error, BaseModelError) else error.expected
    return f"{error.subject} ({said})" if said else error.subject
