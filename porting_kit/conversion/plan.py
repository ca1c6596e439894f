"""What a conversion will do, worked out from names and shapes alone: targets, slices per rank, and the accounts.

Every source tensor and every target is accounted for exactly once. A source that is missing, one that nobody uses, and
one of another shape are three different errors. Nothing here reads values or imports torch, so a plan costs
milliseconds and gives the exact size of every output file before one is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from porting_kit.architectures.names import Dims, Shape, evaluate_dim
from porting_kit.architectures.rules import COLUMN, VOCABULARY, Rule, Shard
from porting_kit.conversion.planned import ConversionPlan, PlannedTensor
from porting_kit.conversion.sharding import UnevenRanks, cut_head_pieces, cut_pieces, locate_target
from porting_kit.errors import ConversionError, suggest_nearest

if TYPE_CHECKING:
    from porting_kit.architectures.base_config import BaseConfig
    from porting_kit.architectures.family import Family
    from porting_kit.conversion.heads import HeadSet
    from porting_kit.conversion.tensor_source import TensorSource

CHECKPOINT_DTYPES = ("float16", "bfloat16", "float32")
WRAPPERS = ("language_model.", "model.language_model.", "module.")
HEAD_PREFIXES = ("medusa_head", "medusa_heads")
OUTPUT, EMBEDDING = "lm_head.weight", "transformer.vocab_embedding.weight"


class MissingTensors(ConversionError):
    """Rules ask for tensors that the source does not hold."""


class SurplusTensors(ConversionError):
    """The source holds tensors that no rule accounts for."""


class ShapeMismatch(ConversionError):
    """Tensors have other shapes than the config says."""


def plan_conversion(
    base: BaseConfig,
    source: TensorSource,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    dtype: str = "float16",
    heads: HeadSet | None = None,
    release: str | None = None,
) -> ConversionPlan:
    """Work out the whole conversion.

    Args:
        base: the base's settings; switches the config leaves open are settled by the tensors.
        source: the base's tensors (names and shapes are used).
        tp_size, pp_size: ranks.
        dtype: dtype of the checkpoint: float16, bfloat16 or float32.
        heads: Medusa heads to join, or None.
        release: TensorRT-LLM release the checkpoint is for; where layouts changed between releases it decides.

    Raises:
        BaseModelError: the base has settings that TensorRT-LLM's class cannot follow.
        MissingTensors, SurplusTensors, ShapeMismatch: the accounts do not close.
        ConversionError: ranks do not divide the model, or an unknown dtype.
        HeadsError: the heads do not fit the base.
    """
    base = base.for_release(release).with_evidence(_canonical_names(base.definition, source.names()))
    base.require_supported()
    _check_request(base, tp_size, pp_size, dtype)
    if heads is not None:
        heads.check_against(base)
    builder = _Builder(base, source, tp_size, pp_size, dtype)
    tensors = builder.plan_base()
    dropped = builder.account()
    if heads is not None:
        tensors += builder.plan_heads(heads, tensors)
    return ConversionPlan(
        base=base,
        tensors=tuple(tensors),
        dropped=dropped,
        dims=base.dims,
        padded_vocab_size=builder.padded_vocab_size,
        tp_size=tp_size,
        pp_size=pp_size,
        dtype=dtype,
    )


def _check_request(base: BaseConfig, tp_size: int, pp_size: int, dtype: str) -> None:
    if dtype not in CHECKPOINT_DTYPES:
        raise ConversionError(
            f"a checkpoint of dtype {dtype!r} cannot be written",
            expected=f"one of {list(CHECKPOINT_DTYPES)}",
            found=repr(dtype),
            next_step="quantised checkpoints are made by TensorRT-LLM's own quantisation from this one",
        )
    if tp_size < 1 or pp_size < 1:
        raise ConversionError(
            "ranks are counted from one",
            expected="tp_size and pp_size from 1",
            found=f"tp_size {tp_size}, pp_size {pp_size}",
            next_step="correct target.tp_size and target.pp_size",
        )
    if base.num_heads % tp_size:
        raise UnevenRanks(
            "query heads do not divide over the ranks",
            expected=f"tp_size among the divisors of {base.num_heads}",
            found=f"tp_size {tp_size}",
            next_step="correct target.tp_size",
        )
    if pp_size > 1 and not base.definition.pipeline:
        raise UnevenRanks(
            f"TensorRT-LLM's {base.architecture} cannot be split over pipeline ranks",
            expected="pp_size 1",
            found=f"pp_size {pp_size}",
            where=f"tensorrt_llm/models/{base.definition.model_folder}/model.py 0.13.0.dev2024090300",
            next_step="set target.pp_size: 1, and split by target.tp_size",
        )
    if pp_size > 1 and base.switches.get("shares_embedding"):
        raise UnevenRanks(
            "an embedding that is the output matrix as well cannot be on the first and the last pipeline rank",
            expected="pp_size 1, or a release whose class takes an output matrix of its own",
            found=f"pp_size {pp_size}, share_embedding_table",
            where="tensorrt_llm/models/modeling_utils.py 0.13.0.dev2024090300",
            next_step="set target.pp_size: 1, and split by target.tp_size",
        )
    if base.num_layers % pp_size:
        raise UnevenRanks(
            "layers do not divide over the pipeline ranks",
            expected=f"pp_size among the divisors of {base.num_layers}",
            found=f"{base.num_layers} layers, pp_size {pp_size}",
            next_step="correct target.pp_size",
        )


def _generic(name: str) -> tuple[str, ...]:
    """Components with every number and placeholder replaced: one key for all layers."""
    return tuple("#" if part.isdecimal() or part.startswith("{") else part for part in name.split("."))


def _canonical_names(family: Family, names: Sequence[str]) -> dict[str, str]:
    """Canonical name -> name in the source.

    Checkpoints saved from the inner model lack its prefix (`h.0...` for `transformer.h.0...`), those saved from a
    wrapper carry one more; both are found. Names that no rule knows stay as they are.
    """
    patterns = {_generic(spec.name) for rule in family.rules for spec in rule.sources}
    patterns |= {_generic(drop.pattern) for drop in family.drops}
    prefix = family.rules[0].sources[0].name.split(".")[0] + "."
    canonical: dict[str, str] = {}
    for name in names:
        candidates = [name, prefix + name]
        candidates += [name.removeprefix(wrapper) for wrapper in WRAPPERS if name.startswith(wrapper)]
        candidates += [prefix + name.removeprefix(wrapper) for wrapper in WRAPPERS if name.startswith(wrapper)]
        chosen = next((candidate for candidate in candidates if _generic(candidate) in patterns), name)
        if chosen in canonical:
            raise SurplusTensors(
                f"{chosen} is there twice under different prefixes",
                expected="each tensor once",
                found=f"{canonical[chosen]} and {name}",
                next_step="remove the tensors that do not belong to this model",
            )
        canonical[chosen] = name
    return canonical


def _with_nearest(name: str, surplus: Sequence[str]) -> str:
    """A missing name, and the unknown one of the source that is nearest to it."""
    near = suggest_nearest(name, surplus)
    return f"{name} (nearest in the source: {near})" if near else name


class _Builder:
    """Builds the targets of one plan and keeps the accounts."""

    def __init__(self, base: BaseConfig, source: TensorSource, tp_size: int, pp_size: int, dtype: str) -> None:
        self.base, self.source, self.dtype = base, source, dtype
        self.tp_size, self.pp_size = tp_size, pp_size
        self.names = _canonical_names(base.definition, source.names())
        self.canonical = {actual: name for name, actual in self.names.items()}
        self.used: set[str] = set()
        self.padded_vocab_size = -(-base.vocab_size // tp_size) * tp_size

    def plan_base(self) -> list[PlannedTensor]:
        """All targets of the base, or the error of the first account that does not close."""
        missing, mismatched, planned = [], [], []
        untied: list[str] = []
        for rule in self.base.definition.rules:
            for numbers, target, sources in rule.expand(self.base.dims, self.base.layer_dims):
                if not self.base.applies(rule.when, numbers.get("i")):
                    continue
                dims = self.base.layer_dims(numbers.get("i"))
                origin = "base"
                absent = [name for name, _ in sources if name not in self.names]
                if absent and rule.tied_from and self.base.tied:
                    origin, sources = "tied", [(rule.tied_from, sources[0][1]), *sources[1:]]
                    absent = [name for name, _ in sources if name not in self.names]
                elif absent and rule.tied_from:
                    untied += absent
                if absent and rule.zeros_when_absent and len(absent) == len(sources):
                    planned.append(self._place(rule, numbers, target, (), "zeros", _shape(rule, dims)))
                    continue
                missing += absent
                if absent:
                    continue
                actual = [self.names[name] for name, _ in sources]
                self.used.update(actual)
                for name, (_, expected) in zip(actual, sources, strict=True):
                    if self.source.shape(name) != expected:
                        mismatched.append(f"{name} {list(self.source.shape(name))} instead of {list(expected)}")
                shape = rule.target_shape([expected for _, expected in sources], dims)
                planned.append(self._place(rule, numbers, target, tuple(actual), origin, shape))
        self._raise_missing(missing, untied)
        if mismatched:
            raise ShapeMismatch(
                f"{len(mismatched)} tensors have other shapes than the config says",
                expected="the config's shapes",
                where=self.source.where,
                items=mismatched,
                next_step="config and weights are of different models or versions: fetch both again",
            )
        return planned

    def _raise_missing(self, missing: list[str], untied: list[str]) -> None:
        if not missing:
            return
        surplus = [name for name in self.source.names() if name not in self.used and not self._dropped(name)]
        if missing == untied:
            raise MissingTensors(
                "the model has no output matrix, and its config does not tie it to the embedding",
                expected=f"{missing[0]}, or tie_word_embeddings true",
                found="neither",
                where=self.source.where,
                next_step="set tie_word_embeddings if the model ties them, or fetch the missing tensor",
            )
        raise MissingTensors(
            f"{len(missing)} tensors that {self.base.family} needs are missing",
            expected="every tensor of the family's rules",
            found=f"{len(self.source.names())} tensors, {len(surplus)} of them unknown to {self.base.family}"
            + (f" (such as {surplus[0]})" if surplus else ""),
            where=self.source.where,
            items=[_with_nearest(name, surplus) for name in missing],
            next_step="the weights are incomplete, quantised, or of another architecture than the config says",
        )

    def _dropped(self, name: str) -> str | None:
        if name.split(".")[0] in HEAD_PREFIXES:
            return "a Medusa head, read as heads and not as part of the base"
        canonical = self.canonical[name]
        for drop in self.base.definition.drops:
            if _generic(drop.pattern) == _generic(canonical):
                return drop.reason
        return None

    def account(self) -> dict[str, str]:
        """Source name -> why it is dropped; SurplusTensors for names nobody accounts for."""
        dropped, surplus = {}, []
        for name in self.source.names():
            if name in self.used:
                continue
            reason = self._dropped(name)
            if reason is None:
                surplus.append(name)
            else:
                dropped[name] = reason
        if surplus:
            raise SurplusTensors(
                f"{len(surplus)} tensors of the model have no place in TensorRT-LLM's {self.base.architecture}",
                expected="the tensors of the family's rules",
                where=self.source.where,
                items=[f"{name} {list(self.source.shape(name))}" for name in surplus],
                next_step="the model has parts its config does not speak of; they would be lost",
            )
        return dropped

    def plan_heads(self, heads: HeadSet, base_tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
        """The heads' targets; heads without an output matrix get the base's."""
        planned = [
            self._head(
                name, (name,), "heads", heads.shape(name), VOCABULARY if name.endswith("lm_head.weight") else COLUMN
            )
            for name in heads.origins
        ]
        if not heads.own_output:
            # A class that shares its embedding with the output (Gemma) has no output matrix of its own.
            by_target = {tensor.target: tensor for tensor in base_tensors}
            output = by_target.get(OUTPUT) or by_target[EMBEDDING]
            shape = (self.base.vocab_size, self.base.hidden_size)
            for head in range(heads.num_heads):
                target = f"medusa_heads.{head}.lm_head.weight"
                copy = self._head(target, output.sources, "copied", shape, VOCABULARY)
                planned.append(replace(copy, operations=output.operations))
        return planned

    def _head(self, target: str, sources: tuple[str, ...], origin: str, shape: Shape, shard: Shard) -> PlannedTensor:
        shape, padded = self._pad(shard, shape)
        pieces = cut_head_pieces(target, shape, shard, self.tp_size, self.pp_size)
        return PlannedTensor(target, sources, origin, (), 1, shape, shard, self.dtype, pieces, padded)

    def _place(
        self, rule: Rule, numbers: Mapping[str, int], target: str, sources: tuple[str, ...], origin: str, shape: Shape
    ) -> PlannedTensor:
        shape, padded = self._pad(rule.shard, shape)
        stage, name = locate_target(target, numbers.get("i"), rule.pipeline, self.base.num_layers, self.pp_size)
        dims = self.base.layer_dims(numbers.get("i"))
        pieces = cut_pieces(name, stage, shape, rule.shard, dims, self.tp_size)
        return PlannedTensor(
            target=target,
            sources=sources,
            origin=origin,
            operations=rule.operations if origin != "zeros" else (),
            group=len(rule.sources),
            shape=shape,
            shard=rule.shard,
            dtype=rule.dtype or self.dtype,
            pieces=pieces,
            padded_rows=padded,
            layer=numbers.get("i"),
        )

    def _pad(self, shard: Shard, shape: Shape) -> tuple[Shape, int]:
        if not shard.vocabulary:
            return shape, 0
        return (self.padded_vocab_size, *shape[1:]), self.padded_vocab_size - shape[0]


def _shape(rule: Rule, dims: Dims) -> Shape:
    return tuple(evaluate_dim(expression, dims) for expression in rule.zeros_when_absent)
