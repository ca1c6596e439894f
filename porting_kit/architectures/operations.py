"""The small operations of weight rules: frozen data that knows its shape arithmetic, and no values.

`conversion.apply` moves the values, forwards and backwards. Each class checks itself when it is declared; a shape that
does not fit raises ValueError with both sides. This module does not import torch and does not know any model family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from porting_kit.architectures.names import Dims, Shape, check_expression, evaluate_dim


@dataclass(frozen=True)
class Concatenate:
    """Join all tensors along `dim`, in the order of the rule's sources."""

    dim: int = 0

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        first = shapes[0]
        if any(len(s) != len(first) or _without(s, self.dim) != _without(first, self.dim) for s in shapes):
            raise ValueError(f"cannot concatenate shapes {list(shapes)} along dim {self.dim}")
        total = sum(shape[self.dim] for shape in shapes)
        return [(*first[: self.dim], total, *first[self.dim + 1 :])]


@dataclass(frozen=True)
class Stack:
    """Put one tensor per value of a placeholder on a new first dimension: experts [J, E] become [X, J, E]."""

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"cannot stack unequal shapes {sorted(set(shapes))}")
        return [(len(shapes), *shapes[0])]


@dataclass(frozen=True)
class Product:
    """Multiply two matrices in float32: embeddings [V, P] by a projection into the hidden size, [P, E].

    Args:
        transposed: the second matrix is stored as [E, P].
    """

    transposed: bool = False

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
            raise ValueError(f"a product needs two matrices, not {list(shapes)}")
        (rows, inner), second = shapes
        again, columns = second[::-1] if self.transposed else second
        if inner != again:
            raise ValueError(f"cannot multiply {shapes[0]} by {(again, columns)}")
        return [(rows, columns)]


@dataclass(frozen=True)
class Ungroup:
    """De-interleave rows stored group by group: [groups, parts, unit] becomes part after part, [Q; K; V].

    BLOOM and GPT-NeoX store, head by head, one query, one key, one value; Falcon stores, key/value head by key/value
    head, its queries, then key and value.

    Args:
        groups: how many groups there are ("H" or "K").
        parts: rows of `unit` in each group ("1", "1", "1" or "H//K", "1", "1").
        unit: rows of one head ("D").
    """

    groups: str
    parts: tuple[str, ...]
    unit: str = "D"

    def __post_init__(self) -> None:
        for expression in (self.groups, *self.parts, self.unit):
            check_expression(expression)

    def counts(self, dims: Dims) -> tuple[int, tuple[int, ...], int]:
        """(groups, parts, unit) in numbers."""
        parts = tuple(evaluate_dim(part, dims) for part in self.parts)
        return evaluate_dim(self.groups, dims), parts, evaluate_dim(self.unit, dims)

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        groups, parts, unit = self.counts(dims)
        (shape,) = shapes
        if shape[0] != groups * sum(parts) * unit:
            raise ValueError(f"{shape[0]} rows are not {groups} groups of {sum(parts)} x {unit}")
        return [shape]


@dataclass(frozen=True)
class Group:
    """Interleave rows the way `Ungroup` takes them apart: part after part becomes group after group."""

    groups: str
    parts: tuple[str, ...]
    unit: str = "D"

    __post_init__ = Ungroup.__post_init__
    counts = Ungroup.counts
    output_shapes = Ungroup.output_shapes


@dataclass(frozen=True)
class ReorderBlocks:
    """Cut `dim` into len(order) equal blocks and write them in `order`: (1, 0) swaps the halves of a fused MLP."""

    order: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"block order {self.order} is no permutation")

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        if shape[self.dim] % len(self.order):
            raise ValueError(f"{shape[self.dim]} does not divide into {len(self.order)} blocks")
        return [shape]


@dataclass(frozen=True)
class Transpose:
    """Swap the last two dimensions (GPT-2's Conv1D holds [in, out])."""

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        return [(*shape[:-2], shape[-1], shape[-2])]


@dataclass(frozen=True)
class Reshape:
    """The same numbers in another shape: experts kept as one matrix [X*J, E] become [X, J, E]."""

    shape: tuple[str, ...]

    def __post_init__(self) -> None:
        for expression in self.shape:
            check_expression(expression)

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        wanted = tuple(evaluate_dim(expression, dims) for expression in self.shape)
        if _count(wanted) != _count(shape):
            raise ValueError(f"shape {shape} does not hold the elements of {wanted}")
        return [wanted]


@dataclass(frozen=True)
class Take:
    """Keep one of several blocks along `dim`: one half of a fused tensor (a split is one rule per block).

    Args:
        blocks: size of every block along `dim`.
        index: which block this rule keeps.
    """

    blocks: tuple[str, ...]
    index: int
    dim: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < len(self.blocks):
            raise ValueError(f"block {self.index} of {len(self.blocks)} does not exist")
        for expression in self.blocks:
            check_expression(expression)

    def bounds(self, dims: Dims) -> tuple[int, int]:
        """First and one-past-last index of the kept block."""
        sizes = [evaluate_dim(block, dims) for block in self.blocks]
        start = sum(sizes[: self.index])
        return start, start + sizes[self.index]

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        total = sum(evaluate_dim(block, dims) for block in self.blocks)
        if shape[self.dim] != total:
            raise ValueError(f"blocks {self.blocks} hold {total}, the tensor holds {shape[self.dim]}")
        start, stop = self.bounds(dims)
        return [(*shape[: self.dim], stop - start, *shape[self.dim + 1 :])]


@dataclass(frozen=True)
class SkipRows:
    """Leave out the first rows: OPT's position table starts with two rows that no position uses."""

    count: int

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        if shape[0] <= self.count:
            raise ValueError(f"cannot skip {self.count} of {shape[0]} rows")
        return [(shape[0] - self.count, *shape[1:])]


@dataclass(frozen=True)
class PadRows:
    """Append zero rows until the first dimension holds `to` rows."""

    to: str

    def __post_init__(self) -> None:
        check_expression(self.to)

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        (shape,) = shapes
        wanted = evaluate_dim(self.to, dims)
        if shape[0] > wanted:
            raise ValueError(f"{shape[0]} rows do not fit into {wanted}")
        return [(wanted, *shape[1:])]


@dataclass(frozen=True)
class Add:
    """Add a constant, in float32 (Gemma keeps its norm weights as offsets from one)."""

    value: float

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        return list(shapes)


@dataclass(frozen=True)
class Scale:
    """Multiply by a constant, or by a number the config gives, in float32.

    Args:
        factor: the number, or the name of a number that the config gives ("logit_scale"); "sqrt_hidden_size" is the
            square root of E.
    """

    factor: float | str

    def __post_init__(self) -> None:
        if not isinstance(self.factor, str) and self.factor == 0:
            raise ValueError("scaling by zero cannot be undone")

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        return list(shapes)


@dataclass(frozen=True)
class NormalizeRows:
    """Divide each row by its Euclidean length, in float32 (Baichuan 2's output matrix). Lengths are not recoverable."""

    def output_shapes(self, shapes: Sequence[Shape], dims: Dims) -> list[Shape]:
        return list(shapes)


Operation = (
    Concatenate
    | Stack
    | Product
    | Ungroup
    | Group
    | ReorderBlocks
    | Transpose
    | Reshape
    | Take
    | SkipRows
    | PadRows
    | Add
    | Scale
    | NormalizeRows
)

MOVING = (Concatenate, Stack, Ungroup, Group, ReorderBlocks, Transpose, Reshape)  # bit-exact and losslessly undone
ONE_INPUT = (Ungroup, Group, ReorderBlocks, Transpose, Reshape, Take, SkipRows, PadRows, Add, Scale, NormalizeRows)


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _count(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
