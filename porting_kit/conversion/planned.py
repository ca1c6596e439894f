"""What a plan consists of: targets, the part of each rank, and the fate of every source tensor.

Plain data, worked out by `plan` from names and shapes; it gives the exact size of every file before one is opened.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from porting_kit.architectures.names import Dims, Shape
from porting_kit.architectures.operations import Operation, SkipRows
from porting_kit.architectures.rules import Shard
from porting_kit.conversion.tensor_entry import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from porting_kit.architectures.base_config import BaseConfig
    from porting_kit.conversion.config_fields import FieldRow
    from porting_kit.conversion.heads import HeadSet
    from porting_kit.conversion.tensor_source import TensorSource

    Target = tuple["PlannedTensor", list[torch.Tensor], torch.Tensor]

FITTED_ORIGIN = "fitted"


@dataclass(frozen=True)
class Piece:
    """One rank's part of a target.

    Args:
        rank: pipeline rank * tp_size + tensor-parallel rank.
        name: name in that rank's file (layers are counted from 0 on every pipeline rank).
        shape: shape of the part.
        slices: [start, stop) ranges along the shard's dim, joined in order; empty for the whole tensor.
        zero: the rank holds zeros (the values are on the first rank).
    """

    rank: int
    name: str
    shape: Shape
    slices: tuple[tuple[int, int], ...] = ()
    zero: bool = False


@dataclass(frozen=True)
class PlannedTensor:
    """One target: which sources make it, how, and how ranks share it.

    Args:
        target: name, with the layer's number in the whole model.
        sources: actual names in the source, in order; none for zeros.
        origin: "base", "heads", "tied" (the embedding stands in), "copied" (the base's output matrix), "zeros" or
            "fitted" (changed by a kernel fit after the operations).
        operations: applied to the sources.
        group: how many sources belong together when a rule repeats over experts.
        shape: shape of the whole target, vocabulary padding included.
        padded_rows: rows of vocabulary padding at the end of dimension 0.
        dtype: dtype in the checkpoint.
        layer: number of the layer in the whole model, None outside the layers.
    """

    target: str
    sources: tuple[str, ...]
    origin: str
    operations: tuple[Operation, ...]
    group: int
    shape: Shape
    shard: Shard
    dtype: str
    pieces: tuple[Piece, ...]
    padded_rows: int = 0
    layer: int | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Size of all ranks' parts together."""
        return sum(math.prod(piece.shape) for piece in self.pieces) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ConversionPlan:
    """All targets of one conversion and the fate of every source tensor.

    Args:
        tensors: in the order they are written.
        dropped: source name -> reason.
        names: canonical name (as rules spell it) -> name in the source.
        dims: letters -> sizes, and `Vp` is `padded_vocab_size`.
    """

    base: BaseConfig
    tensors: tuple[PlannedTensor, ...]
    dropped: Mapping[str, str]
    dims: Dims
    padded_vocab_size: int
    tp_size: int
    pp_size: int
    dtype: str

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size

    @property
    def rules_digest(self) -> str:
        """SHA-256 of the rules as this plan applies them: targets, sources, operations, slices of every rank."""
        return hashlib.sha256("\n".join(map(repr, self.tensors)).encode()).hexdigest()

    def dims_of(self, planned: PlannedTensor) -> Dims:
        """Letters -> sizes in a target's own layer."""
        return self.base.layer_dims(planned.layer) if self.base.layers else self.dims

    def rank_tensors(self, rank: int) -> dict[str, tuple[str, Shape]]:
        """Name -> (dtype, shape) of everything in one rank's file."""
        return {
            piece.name: (tensor.dtype, piece.shape)
            for tensor in self.tensors
            for piece in tensor.pieces
            if piece.rank == rank
        }


class TargetFit(Protocol):
    """A kernel fit that a conversion lets change its attention targets on the way; one object for one conversion."""

    @property
    def unfitted_plan(self) -> ConversionPlan:
        """The plan that `refit_plan` was given."""

    def refit_plan(self, plan: ConversionPlan, config: Mapping[str, Any]) -> ConversionPlan:
        """The plan with the fitted shapes and pieces, their origin "fitted"."""

    def looks_at(self, planned: PlannedTensor) -> bool:
        """Whether the fit needs a target's values, to change them or to know them; all others pass unchanged."""

    def refit_targets(self, targets: Iterator[Target]) -> Iterator[Target]:
        """The stream of (planned, sources, whole) with the fitted values."""

    def finish_config(
        self, config: Mapping[str, Any], table: Sequence[FieldRow]
    ) -> tuple[dict[str, Any], tuple[FieldRow, ...]]:
        """The fitted config.json and its table, when all targets have passed."""


def plan_scalars(plan: ConversionPlan) -> Mapping[str, float]:
    """Numbers of the config that `Scale` may name."""
    values = {
        **plan.base.raw,
        **{name: getattr(plan.base, name) for name in ("q_scaling", "head_size", "output_scale")},
    }
    values["sqrt_hidden_size"] = math.sqrt(plan.base.hidden_size)
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def read_source(planned: PlannedTensor, name: str, source: TensorSource, heads: HeadSet | None) -> torch.Tensor:
    """One source tensor of a target, from the base or from the heads."""
    return heads.read(name) if planned.origin == "heads" else source.read(name)


def read_skipped_rows(plan: ConversionPlan, source: TensorSource) -> torch.Tensor | None:
    """Rows [n, E] of the base's position table that its rule leaves out; None where no rule leaves out any."""
    for planned in plan.tensors:
        for operation in planned.operations:
            if isinstance(operation, SkipRows):
                return source.read(planned.sources[0])[: operation.count]
    return None
