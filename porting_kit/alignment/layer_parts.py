"""Which parts of the port and of the base are compared, and what a difference in one of them means.

Modules that hold weights pair up by the conversion plan: a port's matrix that was made of some of the base's matrices
puts out what those put out, joined and reordered the same way. So a family needs no table of its own here, however its
layers are named or fused. The parts between them follow from those pairs: what the output projection of the attention
reads, the keys as the cache holds them (behind the rotary embedding), the MLP as a whole where its experts cannot be
paired, and what leaves a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from porting_kit.alignment.reference import Reference
from porting_kit.architectures import operations as ops

SUFFIX = ".weight"
OUTPUT, INPUT, KEYS = "output", "input", "keys"
# What a weight operation does to the module's output: rows of the weight are entries of the output.
_ON_ROWS = (ops.Concatenate, ops.Ungroup, ops.ReorderBlocks, ops.Take, ops.PadRows, ops.Scale)
_NO_EFFECT = (ops.Transpose, ops.Add)  # Conv1D's storage; a norm's weight kept as an offset from one
_WHOLE_HEADS = (ops.Concatenate, ops.Ungroup)  # the entries of each head stay in their order
_LAYERS = ".layers."
_DENSE, _QKV, _MLP, _MLP_LAST = ".attention.dense", ".attention.qkv", ".mlp.", ".mlp.proj"

_MEANINGS = (
    ("vocab_embedding", "the token embedding, or a factor on it"),
    ("position_embedding", "the learned positions"),
    ("ln_embed", "the norm after the embedding"),
    ("layernorm", "this norm's weights or its epsilon"),
    ("attention.qkv", "the fused query, key and value projection: order of its rows, or its bias"),
    (
        "attention.keys",
        "the keys as the cache holds them, behind a projection that agrees: rotary base, kind, share or scaling, or "
        "the positions",
    ),
    (
        "attention.context",
        "the attention itself: what it does with the queries (rotary embedding, scaling, soft-cap, ALiBi), its mask or "
        "window, or the rows of the cache",
    ),
    ("mlp.fc", "the first MLP matrix: gate and up swapped, or its bias"),
    ("mlp.gate", "the second MLP input matrix: gate and up swapped, or its bias"),
    ("mlp.proj", "the MLP's activation, or its last matrix"),
    (".mlp", "the experts: their order, the router, or how their outputs are weighted"),
    (".residual", "what the layer adds up, although each part agrees: a factor on a branch, or the order of the norms"),
    ("ln_f", "the last norm"),
    ("lm_head", "the output matrix"),
)
_DENSE_ALONE = "the attention's output projection: its weight or its bias"
_DENSE_WITH_ATTENTION = (
    "the attention between the projections (rotary base and kind, ALiBi, scaling, mask, cache), or the output "
    "projection"
)


class PlannedTarget(Protocol):
    """`conversion.plan.PlannedTensor`, as far as it matters here."""

    target: str
    sources: tuple[str, ...]
    operations: tuple[Any, ...]
    group: int
    origin: str


@dataclass(frozen=True)
class ModulePair:
    """A part of the port and the parts of the base that it is made of.

    Args:
        module: the port's module, or the name given to a part of it.
        sources: dotted names of modules in the base.
        operations: what turns the bases' outputs, rows first, into the port's.
        group: see `PlannedTensor.group`.
        view: what is read there: the modules' `output`, the `input` of the base's module, or the `keys` that the base's
            attention module leaves in the cache.
    """

    module: str
    sources: tuple[str, ...]
    operations: tuple[Any, ...] = ()
    group: int = 0
    view: str = OUTPUT

    @property
    def keys(self) -> tuple[str, ...]:
        """What the sources' tensors are called in a record of the base."""
        return tuple(recorded_name(source, self.view) for source in self.sources)


def recorded_name(module: str, view: str) -> str:
    """A module's output goes by its name, its other tensors by name and view."""
    return module if view == OUTPUT else f"{module}:{view}"


def pair_modules(tensors: Sequence[PlannedTarget], reference: Reference) -> list[ModulePair]:
    """Everything of a conversion plan's port that can be compared with the base.

    Args:
        tensors: the plan's.
        reference: the base.
    """
    modules = dict(reference.model.named_modules())
    owners = [(planned, tuple(_find_module(name, set(modules)) for name in planned.sources)) for planned in tensors]
    pairs = []
    for planned, sources in owners:
        kept = tuple(operation for operation in planned.operations if not isinstance(operation, _NO_EFFECT))
        comparable = all(isinstance(operation, _ON_ROWS) for operation in kept) and planned.origin == "base"
        if planned.target.endswith(SUFFIX) and sources and all(sources) and comparable:
            pairs.append(ModulePair(planned.target.removesuffix(SUFFIX), sources, kept, planned.group))
    return [*pairs, *_attention_parts(pairs, modules), *_whole_parts(owners, pairs, modules)]


def _attention_parts(pairs: Sequence[ModulePair], modules: dict[str, Any]) -> Iterator[ModulePair]:
    """What the output projection reads, and the rotated keys, where the port keeps heads and entries in their order."""
    by_module = {pair.module: pair for pair in pairs}
    for name, dense in by_module.items():
        if not name.endswith(_DENSE) or dense.operations or len(dense.sources) != 1:
            continue
        layer = name.removesuffix(_DENSE)
        attention = dense.sources[0].rpartition(".")[0]
        qkv = by_module.get(layer + _QKV)
        whole_heads = qkv is not None and all(isinstance(operation, _WHOLE_HEADS) for operation in qkv.operations)
        if whole_heads and getattr(modules.get(attention), "layer_idx", None) is not None:
            yield ModulePair(f"{layer}.attention.keys", (attention,), view=KEYS)
        yield ModulePair(f"{layer}.attention.context", dense.sources, view=INPUT)


def _whole_parts(
    owners: Sequence[tuple[PlannedTarget, tuple[str | None, ...]]], pairs: Sequence[ModulePair], modules: dict[str, Any]
) -> Iterator[ModulePair]:
    """The MLP of a layer whose last matrix has no pair (experts), and what leaves the layer."""
    paired = {pair.module for pair in pairs}
    members: dict[str, set[str]] = {}
    for planned, sources in owners:
        if planned.origin == "base" and _LAYERS in planned.target:
            layer = _layer_of(planned.target)
            found = {source for source in sources if source}
            members.setdefault(layer, set()).update(found)
            if planned.target.startswith(layer + _MLP):
                names = found or {name.rpartition(".")[0] for name in planned.sources}
                members.setdefault(f"{layer}.mlp", set()).update(names)
    for part, names in members.items():
        owner = _common_module(names, modules)
        is_mlp = part.endswith(".mlp")
        if owner is None or (is_mlp and (f"{part.removesuffix('.mlp')}{_MLP_LAST}" in paired)):
            continue
        if is_mlp and (owner[-1].isdigit() or _serves_others(owner, part, owners)):
            continue  # the layer itself, one expert, or a module that the port splits: none is the MLP alone
        if is_mlp or owner[-1].isdigit():
            yield ModulePair(part if is_mlp else f"{part}.residual", (owner,))


def _serves_others(owner: str, part: str, owners: Sequence[tuple[PlannedTarget, tuple[str | None, ...]]]) -> bool:
    """Whether parts of a base's module go elsewhere too: a shared expert beside the routed ones."""
    others = (sources for planned, sources in owners if not planned.target.startswith(f"{part}."))
    return any(source and source.startswith(f"{owner}.") for sources in others for source in sources)


def _layer_of(target: str) -> str:
    """`transformer.layers.3.mlp.fc.weight` -> `transformer.layers.3`."""
    head, _, tail = target.partition(_LAYERS)
    return f"{head}{_LAYERS}{tail.split('.')[0]}"


def _common_module(names: set[str], modules: dict[str, Any]) -> str | None:
    """The innermost module of the base that owns all of these."""
    if len(names) < 2:
        return None
    split = [name.split(".") for name in names]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*split, strict=False))
    owner = ".".join(level[0] for level in levels)
    return owner if owner and owner in modules else None


def _find_module(tensor_name: str, known: set[str]) -> str | None:
    """The base's module that owns a tensor; the file may spell the name without the wrapper's prefix, or with one."""
    if not tensor_name.endswith(SUFFIX):
        return None
    name = tensor_name.removesuffix(SUFFIX)
    if name in known:
        return name
    longer = [candidate for candidate in known if candidate.endswith(f".{name}") or name.endswith(f".{candidate}")]
    return longer[0] if len(longer) == 1 else None


def explain_part(module: str, *, attention_compared: bool) -> str:
    """What it means that the port first parts from the base here.

    Args:
        module: name of the part.
        attention_compared: the attention's own output was compared, and agrees.
    """
    if module.endswith(_DENSE):
        return _DENSE_ALONE if attention_compared else _DENSE_WITH_ATTENTION
    return next((meaning for name, meaning in _MEANINGS if name in module), "this module")
