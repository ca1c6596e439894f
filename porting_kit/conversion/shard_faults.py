"""What is wrong with a sharded checkpoint: which known mistake of cutting makes the files that are there.

Each hypothesis cuts the right whole target in a wrong way. A hypothesis is named for a target when it gives every
rank's part, bit for bit. What no hypothesis explains is described by its first differing value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from porting_kit.architectures.names import Dims, evaluate_dim
from porting_kit.conversion.apply import build_target, cut_piece
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor, plan_scalars, read_source
from porting_kit.conversion.proof import Proof, ReadTensor
from porting_kit.conversion.tensor_source import TensorSource

if TYPE_CHECKING:
    from porting_kit.conversion.heads import HeadSet


@dataclass(frozen=True)
class Cutting:
    """One target as it should be cut: the whole, what each rank should hold, and what it does hold."""

    planned: PlannedTensor
    whole: torch.Tensor
    expected: tuple[torch.Tensor, ...]
    found: tuple[torch.Tensor, ...]
    dims: Dims

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return len(self.expected)

    def equals(self, parts: Sequence[torch.Tensor] | None) -> bool:
        """Whether these parts are what the ranks hold, and not what they should hold."""
        return parts is not None and all(
            part.shape == held.shape and torch.equal(part, held) for part, held in zip(parts, self.found, strict=True)
        )

    def describe_first(self) -> str:
        """Rank, place and both values of the first difference."""
        for piece, want, held in zip(self.planned.pieces, self.expected, self.found, strict=True):
            unlike = want != held
            if bool(unlike.any()):
                index = tuple(int(i) for i in unlike.nonzero()[0])
                return (
                    f"{self.planned.target}, rank {piece.rank}: {int(unlike.sum())} of {want.numel()} values differ, "
                    f"the first at {list(index)} ({float(held[index]):g} instead of {float(want[index]):g})"
                )
        return f"{self.planned.target}: the values are equal, their bits are not"


@dataclass(frozen=True)
class ShardFault:
    """One mistake and the targets it explains.

    Args:
        name: short name.
        what: the mistake, one sentence.
        fix: what to do.
        targets: in the plan's order.
        evidence: one sentence on the first of them.
    """

    name: str
    what: str
    fix: str
    targets: tuple[str, ...]
    evidence: str

    def as_cause(self, others: Sequence[ShardFault] = ()) -> dict[str, Any]:
        """The form in which an alignment states its cause."""
        return {
            "name": self.what,
            "fault": self.name,
            "kind": "sharding",
            "fix": self.fix,
            "evidence": [f"{self.evidence} ({len(self.targets)} tensors)"]
            + [f"also: {other.what}: {other.evidence}" for other in others],
            "ties": [],
        }


Parts = list[torch.Tensor]
OTHER_VALUES = "other values"
"""Name of what no mistake explains."""


@dataclass(frozen=True)
class Mistake:
    """A hypothesis: a wrong way to cut. `cut` gives all ranks' parts, None where it does not apply."""

    name: str
    what: str
    fix: str
    cut: Callable[[Cutting], Parts | None]


def _reorder(cutting: Cutting) -> Parts | None:
    """The right parts, on other ranks than theirs."""
    if cutting.planned.shard.dim is None:
        return None
    same = sorted(map(_digest, cutting.found)) == sorted(map(_digest, cutting.expected))
    return list(cutting.found) if same else None


def _digest(part: torch.Tensor) -> str:
    flat = part.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()


def _cut_equally(cutting: Cutting) -> Parts | None:
    """Equal thirds of the fused tensor, where each block should be cut by itself."""
    shard = cutting.planned.shard
    if len(shard.blocks) < 2 or cutting.whole.shape[shard.dim] % cutting.ranks:
        return None
    return [part.contiguous() for part in cutting.whole.chunk(cutting.ranks, shard.dim)]


def _repeat_everywhere(cutting: Cutting) -> Parts | None:
    """The values of the first rank on every rank, where the others should hold zeros."""
    return [cutting.expected[0]] * cutting.ranks if cutting.planned.shard.first_rank_only else None


def _keep_whole(cutting: Cutting) -> Parts | None:
    """The first rank's part on every rank."""
    if cutting.planned.shard.dim is None:
        return None
    return [cutting.expected[0]] * cutting.ranks


def _deal_heads(cutting: Cutting) -> Parts | None:
    """Key/value heads dealt round (rank r gets head r mod K), where neighbouring ranks should share one."""
    return _choose_heads(cutting, lambda rank, count: rank % count)


def _first_head_everywhere(cutting: Cutting) -> Parts | None:
    """Key/value head 0 on every rank."""
    return _choose_heads(cutting, lambda rank, count: 0)


def _choose_heads(cutting: Cutting, choose: Callable[[int, int], int]) -> Parts | None:
    """Blocks with fewer heads than ranks by a rule of choice, the others as they should be cut."""
    shard = cutting.planned.shard
    counts = [evaluate_dim(heads, cutting.dims) for heads in shard.heads]
    if not any(count < cutting.ranks for count in counts):
        return None
    sizes = [evaluate_dim(block, cutting.dims) for block in shard.blocks]
    parts = []
    for rank in range(cutting.ranks):
        rows, start = [], 0
        for size, count in zip(sizes, counts, strict=True):
            is_repeated = count < cutting.ranks
            share = size // (count if is_repeated else cutting.ranks)
            first = (choose(rank, count) if is_repeated else rank) * share
            rows.append(cutting.whole.narrow(shard.dim, start + first, share))
            start += size
        parts.append(torch.cat(rows, shard.dim))
    return parts


MISTAKES = (
    Mistake(
        "kv heads dealt round",
        "key/value heads are given to the ranks in turn, but neighbouring ranks must share a head",
        "give rank r the key/value head r * K // tp_size, as tensorrt_llm/layers/attention.py expects",
        _deal_heads,
    ),
    Mistake(
        "kv head 0 everywhere",
        "every rank holds the first key/value head",
        "give rank r the key/value head r * K // tp_size, as tensorrt_llm/layers/attention.py expects",
        _first_head_everywhere,
    ),
    Mistake(
        "shards in another order",
        "the ranks hold each other's parts",
        "write part r into rank r's file",
        _reorder,
    ),
    Mistake(
        "fused tensor cut into equal parts",
        "a fused tensor is cut into equal runs, so ranks hold rows of the wrong block (query rows as keys)",
        "cut query, key and value (or gate and up) each by itself and join the parts of a rank",
        _cut_equally,
    ),
    Mistake(
        "bias on every rank",
        "a bias that is added after the sum over the ranks is there on every rank, so it is added once for each",
        "keep it on the first rank and write zeros on the others",
        _repeat_everywhere,
    ),
    Mistake(
        "first part everywhere",
        "every rank holds the part of the first",
        "write part r into rank r's file",
        _keep_whole,
    ),
)


def explain_failures(
    plan: ConversionPlan, source: TensorSource, heads: HeadSet | None, readers: Sequence[ReadTensor], proof: Proof
) -> tuple[ShardFault, ...]:
    """Name the mistakes behind the targets that a proof found wrong, the one with most targets first.

    Args:
        readers: one per rank, see `prove_targets`.
        proof: its failures are explained.
    """
    failed = {failure.target: failure for failure in proof.failures}
    explained: dict[Mistake, list[str]] = {}
    evidence: dict[Mistake, str] = {}
    rest: list[tuple[str, str]] = []
    for planned in plan.tensors:
        if planned.target not in failed:
            continue
        cutting = read_cutting(plan, planned, source, heads, readers)
        mistake = next((one for one in MISTAKES if cutting.ranks > 1 and cutting.equals(one.cut(cutting))), None)
        if mistake is None:
            rest.append((planned.target, cutting.describe_first()))
        else:
            explained.setdefault(mistake, []).append(planned.target)
            evidence.setdefault(mistake, cutting.describe_first())
    faults = [
        ShardFault(mistake.name, mistake.what, mistake.fix, tuple(targets), evidence[mistake])
        for mistake, targets in explained.items()
    ]
    faults.sort(key=lambda fault: -len(fault.targets))
    if rest:
        fix = "convert again; if it stays, the disk or the memory is faulty"
        targets = tuple(target for target, _ in rest)
        faults.append(ShardFault(OTHER_VALUES, "tensors hold other values than the source", fix, targets, rest[0][1]))
    return tuple(faults)


def read_cutting(
    plan: ConversionPlan,
    planned: PlannedTensor,
    source: TensorSource,
    heads: HeadSet | None,
    readers: Sequence[ReadTensor],
) -> Cutting:
    """One target as it should be cut and as the rank files hold it; arguments as for `prove_targets`."""
    values = [read_source(planned, name, source, heads) for name in planned.sources]
    dims = plan.dims_of(planned)
    whole = build_target(planned, values, dims, plan_scalars(plan))
    expected = tuple(cut_piece(whole, planned, piece) for piece in planned.pieces)
    found = tuple(readers[piece.rank](piece.name) for piece in planned.pieces)
    return Cutting(planned, whole, expected, found, dims)
