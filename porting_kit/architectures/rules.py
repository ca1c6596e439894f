"""Weight rules as data: how tensors of a Hugging Face model become tensors of a TensorRT-LLM checkpoint.

A rule names its source tensors with their shapes, a chain of small operations, one target tensor, and how the target
is split over tensor-parallel ranks. Rules are frozen, check themselves when they are declared, and hold no code: shapes
are worked out here with integers alone, values are moved by `conversion.apply`, which also runs every rule backwards.
This module does not import torch and does not know any model family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from porting_kit.architectures.names import (
    INDICES,
    Dims,
    Shape,
    TensorSpec,
    check_expression,
    check_pattern,
    evaluate_dim,
    placeholders,
)
from porting_kit.architectures.operations import MOVING, ONE_INPUT, Concatenate, Operation, Product, Stack


@dataclass(frozen=True)
class Shard:
    """How one target tensor is split over tensor-parallel ranks.

    Args:
        dim: the dimension that is split; None keeps the whole tensor on every rank.
        blocks: sizes of the blocks along `dim` that are split one by one ([Q; K; V], [up; gate]); empty means one.
        heads: heads in each block. A block with fewer heads than ranks is repeated: each rank gets one whole head.
        vocabulary: the dimension counts tokens and is padded to a multiple of the ranks first.
        first_rank_only: rank 0 holds the values, the others zeros, because the results of all ranks are summed.
    """

    dim: int | None = None
    blocks: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    vocabulary: bool = False
    first_rank_only: bool = False

    def __post_init__(self) -> None:
        for expression in (*self.blocks, *self.heads):
            check_expression(expression)
        if self.heads and len(self.heads) != len(self.blocks):
            raise ValueError("a shard with heads names the heads of every block")
        if self.dim is None and (self.blocks or self.vocabulary):
            raise ValueError("a replicated tensor has neither blocks nor a vocabulary to pad")
        if self.first_rank_only and self.dim is not None:
            raise ValueError("a tensor kept on the first rank alone is not split")


REPLICATED = Shard()
COLUMN = Shard(0)
ROW = Shard(1)
VOCABULARY = Shard(0, vocabulary=True)
QKV = Shard(0, blocks=("H*D", "K*D", "K*D"), heads=("H", "K", "K"))
GATED = Shard(0, blocks=("I", "I"))
EXPERTS_UP = Shard(1, blocks=("J", "J"))
EXPERTS_UP_PLAIN = Shard(1)
EXPERTS_DOWN = Shard(2)
FIRST_RANK = Shard(first_rank_only=True)


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """Sources -> operations -> one target, split over ranks.

    Args:
        target: name of the checkpoint's tensor, placeholders as in the sources.
        sources: the source tensors in order; a placeholder that the target lacks is expanded (experts).
        operations: applied left to right.
        shard: how ranks share the target.
        when: `BaseConfig` switches that must hold: "attention_bias", "!multi_query", "bias & parallel"; None: always.
        tied_from: name of the source tensor that stands in when the model ties its embeddings.
        zeros_when_absent: shape of a zero tensor written when no source exists, for a bias the runtime class insists
            on and this model does not have.
        dtype: dtype in the checkpoint, None for the checkpoint's own (the expert router stays float32).
        pipeline: which pipeline rank holds it: "layer", "first", "last".
        layers: first and one-past-last layer the rule is for; None means all.
    """

    target: str
    sources: tuple[TensorSpec, ...]
    operations: tuple[Operation, ...] = ()
    shard: Shard = REPLICATED
    when: str | None = None
    tied_from: str | None = None
    zeros_when_absent: tuple[str, ...] = ()
    dtype: str | None = None
    pipeline: str = "layer"
    layers: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        check_pattern(self.target)
        if not self.sources:
            raise ValueError(f"rule for {self.target!r} has no source")
        wanted = set(placeholders(self.target))
        for source in self.sources:
            found = set(placeholders(source.name))
            if not wanted <= found:
                raise ValueError(f"rule for {self.target!r}: source {source.name!r} lacks {sorted(wanted - found)}")
        self._check_joined(len(self.sources), set(placeholders(self.sources[0].name)) != wanted)
        if self.pipeline not in ("layer", "first", "last"):
            raise ValueError(f"rule for {self.target!r}: pipeline {self.pipeline!r} is not layer, first or last")
        for expression in (*(self.layers or ()), *self.zeros_when_absent):
            check_expression(expression)
        if ("i" in wanted) != (self.pipeline == "layer"):
            raise ValueError(f"rule for {self.target!r}: only tensors of a layer carry the layer number")

    def _check_joined(self, parts: int, repeated: bool) -> None:
        """The operations must leave one tensor: `parts` sources, repeated over a placeholder or not."""
        for operation in self.operations:
            if isinstance(operation, Stack):
                if parts > 1:
                    raise ValueError(f"rule for {self.target!r} stacks before its {parts} parts are joined")
                repeated = False
            elif isinstance(operation, Product):
                if parts != 2 or repeated:
                    raise ValueError(f"rule for {self.target!r} multiplies {parts} parts, not two")
                parts = 1
            elif isinstance(operation, Concatenate):
                parts, repeated = 1, repeated and parts > 1
        if parts > 1 or repeated:
            raise ValueError(f"rule for {self.target!r} has several sources and nothing that joins them")

    @property
    def invertible(self) -> bool:
        """True when the sources can be had back bit for bit from the target (before the cast to its dtype)."""
        return all(isinstance(operation, MOVING) for operation in self.operations)

    def expand(
        self, dims: Dims, layer_dims: Callable[[int | None], Dims] | None = None
    ) -> Iterator[tuple[dict[str, int], str, list[tuple[str, Shape]]]]:
        """Every (placeholder values, target name, [(source name, shape)]) of this rule for a model of these sizes.

        Sources with a placeholder of their own (experts) come expert by expert, each with all its parts.

        Args:
            dims: the model's sizes.
            layer_dims: a layer's number -> its sizes, where layers differ.
        """
        outer = placeholders(self.target)
        inner = tuple(p for p in placeholders(self.sources[0].name) if p not in outer)
        ranges = {p: range(dims[INDICES[p]]) for p in outer}
        if self.layers is not None:
            ranges["i"] = range(evaluate_dim(self.layers[0], dims), evaluate_dim(self.layers[1], dims))
        for values in product(*(ranges[p] for p in outer)):
            numbers = dict(zip(outer, values, strict=True))
            own = dims if layer_dims is None else layer_dims(numbers.get("i"))
            sources = []
            for inner_values in product(*(range(dims[INDICES[p]]) for p in inner)):
                every = numbers | dict(zip(inner, inner_values, strict=True))
                sources += [(source.name.format(**every), source.resolve(own)) for source in self.sources]
            yield numbers, self.target.format(**numbers), sources

    def target_shape(self, sources: Sequence[Shape], dims: Dims) -> Shape:
        """Shape of the whole target (all ranks, vocabulary unpadded) from the shapes of the sources."""
        shapes = list(sources)
        parts = len(self.sources)
        for operation in self.operations:
            if isinstance(operation, Concatenate) and len(shapes) > parts > 1:
                # several experts: the parts of each expert are joined, the experts stay apart for Stack
                grouped = [shapes[k : k + parts] for k in range(0, len(shapes), parts)]
                shapes = [shape for group in grouped for shape in operation.output_shapes(group, dims)]
            elif isinstance(operation, ONE_INPUT) and len(shapes) > 1:
                shapes = [shape for one in shapes for shape in operation.output_shapes([one], dims)]
            else:
                shapes = operation.output_shapes(shapes, dims)
        if len(shapes) != 1:
            raise ValueError(f"rule for {self.target!r} leaves {len(shapes)} tensors")
        return shapes[0]


def condition_terms(condition: str | None) -> list[tuple[str, bool]]:
    """The (switch, wanted value) pairs of a rule's `when`."""
    terms = [term.strip() for term in condition.split("&")] if condition else []
    return [(term.removeprefix("!"), not term.startswith("!")) for term in terms]


@dataclass(frozen=True)
class Drop:
    """A source tensor that the checkpoint does without, and why."""

    pattern: str
    reason: str

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if not self.reason:
            raise ValueError(f"dropping {self.pattern!r} needs a reason")


# ---------------------------------------------------------------- short forms for the families' tables


def rename(source: str, target: str, **options: object) -> Rule:
    """One source, one target, same values. Tensors without a layer number say `pipeline=` "first" or "last"."""
    return Rule(target, (TensorSpec.parse(source),), **_placed(target, options))


def transform(source: str, target: str, *operations: Operation, **options: object) -> Rule:
    """One source, changed by `operations`."""
    return Rule(target, (TensorSpec.parse(source),), operations, **_placed(target, options))


def fuse(sources: Sequence[str], target: str, *operations: Operation, dim: int = 0, **options: object) -> Rule:
    """Several sources joined along `dim`, then changed by `operations`."""
    specs = tuple(TensorSpec.parse(source) for source in sources)
    return Rule(target, specs, (Concatenate(dim), *operations), **_placed(target, options))


def linear(
    source: str, target: str, shape: str, *, shard: Shard, bias: bool | str = False, bias_shard: Shard | None = None
) -> list[Rule]:
    """A linear layer's weight and, where it has one, its bias.

    Args:
        source: dotted name of the layer in the source, without `.weight`.
        target: dotted name in the checkpoint.
        shape: "out, in".
        shard: COLUMN, ROW, QKV or GATED for the weight.
        bias: True, False, or the name of the switch that decides.
        bias_shard: by default the weight's own when its outputs are split, else replicated.
    """
    rules = [rename(f"{source}.weight [{shape}]", f"{target}.weight", shard=shard)]
    if bias:
        out = shape.split(",")[0].strip()
        chosen = bias_shard if bias_shard is not None else (shard if shard.dim == 0 else REPLICATED)
        when = bias if isinstance(bias, str) else None
        rules.append(rename(f"{source}.bias [{out}]", f"{target}.bias", shard=chosen, when=when))
    return rules


def norm(source: str, target: str, *, bias: bool | str = False, size: str = "E", pipeline: str = "layer") -> list[Rule]:
    """A normalisation's weight and, for LayerNorm, its bias."""
    rules = [rename(f"{source}.weight [{size}]", f"{target}.weight", pipeline=pipeline)]
    if bias:
        when = bias if isinstance(bias, str) else None
        rules.append(rename(f"{source}.bias [{size}]", f"{target}.bias", pipeline=pipeline, when=when))
    return rules


def embedding(source: str) -> Rule:
    """The token embedding, on the first pipeline rank."""
    return rename(f"{source} [V,E]", "transformer.vocab_embedding.weight", pipeline="first")


def output_matrix(source: str, tied_from: str, *operations: Operation) -> Rule:
    """The output matrix, split over the vocabulary; a model with tied embeddings takes `tied_from`."""
    spec = TensorSpec(source, ("V", "E"))
    return Rule("lm_head.weight", (spec,), operations, shard=VOCABULARY, tied_from=tied_from, pipeline="last")


def only_when(rules: Sequence[Rule], condition: str, **changes: object) -> list[Rule]:
    """The same rules under one more condition, with other fields changed if asked for."""
    return [replace(rule, when=f"{rule.when} & {condition}" if rule.when else condition, **changes) for rule in rules]


def restrict(rules: Sequence[Rule], first: str, stop: str) -> list[Rule]:
    """The same rules for layers `first` to `stop` (one past the last) only."""
    return [replace(rule, layers=(first, stop)) for rule in rules]


def _placed(target: str, options: dict[str, object]) -> dict[str, object]:
    """Tensors outside the layers belong to the last pipeline rank unless the table says otherwise."""
    if "pipeline" not in options and "i" not in placeholders(target):
        return {**options, "pipeline": "last"}
    return options
