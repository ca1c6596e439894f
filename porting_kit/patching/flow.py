"""Follow the speculative-decoding arguments through a model definition, from the top class to each attention call.

The way down is: top class -> model -> decoder layers -> (methods of the layer) -> `Attention`. A method is on the way
when it calls something that is on the way; the search starts at the calls of `tensorrt_llm.layers.Attention`, so it
does not depend on names of models, layers or attributes. What this cannot see: calls through variables other than loop
variables, and attributes set from outside the class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .structure import Call, Method, ModelClass, ModelFile, read_model_file

ATTENTION_CLASS = "Attention"
TOP_CLASS = "DecoderModelForCausalLM"
LIST_CLASSES = ("ModuleList", "DecoderLayerList")
# Bases of top classes that make the network's inputs themselves (models/modeling_utils.py, models/generation_mixin.py).
INPUT_MAKING_BASES = ("PretrainedModel", "GenerationMixin", "TopModelMixin")

# Every name the arguments have had; facts and releases in `source_tree`.
ALL_SPEC_ARGUMENTS = (
    "medusa_packed_mask",
    "medusa_position_offsets",
    "spec_decoding_packed_mask",
    "spec_decoding_position_offsets",
    "spec_decoding_params",
)

MISSING_PARAMETER = "missing parameter"
NOT_PASSED = "not passed"
SWALLOWED = "swallowed by **kwargs"
OTHER_RELEASE = "another release's name"


@dataclass(frozen=True)
class Drop:
    """One place where an argument does not get through.

    Args:
        class_name, method: where it happens.
        line: the line of the signature or call.
        level: what the argument does not reach: "top", "model", "layer" or "attention".
        kind: "missing parameter", "not passed", "swallowed by **kwargs" or "another release's name".
        argument: its name.
        call: the callee at fault ("self.attention"), None for a signature.
    """

    class_name: str
    method: str
    line: int
    level: str
    kind: str
    argument: str
    call: str | None = None

    def __str__(self) -> str:
        where = f"line {self.line}, {self.class_name}.{self.method}"
        at = "" if self.call is None else f" to {self.call}"
        return f"{where}: {self.argument} {self.kind}{at}, so it does not reach the {self.level}"


@dataclass(frozen=True)
class Step:
    """One call on the way down: to what `level` names, by way of a list of layers or not."""

    call: Call
    level: str
    by_list: bool = False


@dataclass(frozen=True)
class Carrier:
    """A method on the way down and its calls further down; `level` is the level of the method itself."""

    owner: ModelClass
    method: Method
    level: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Flow:
    """The way down through one file.

    Args:
        carriers: the methods on the way, in the order of the text.
        layers, models, tops: names of the classes at each level; `tops` holds every class that derives from
            DecoderModelForCausalLM or makes its inputs itself.
        foreign_attention: attention classes other than `Attention`, with where they are built.
    """

    carriers: tuple[Carrier, ...]
    layers: tuple[str, ...]
    models: tuple[str, ...]
    tops: tuple[str, ...]
    foreign_attention: tuple[str, ...]


def find_dropped_arguments(source: str, spec_arguments: tuple[str, ...], file: str = "model.py") -> tuple[Drop, ...]:
    """Every place of a model definition where a speculative-decoding argument does not get through.

    Args:
        source: the text of a model.py.
        spec_arguments: the era's names (`SourceTree.spec_arguments`).
        file: its name, for messages.

    Returns:
        The drops in the order of the text; empty when every attention call gets every argument, and also when the file
        has no attention call at all.

    Raises:
        PatchError: the text cannot be parsed or defines something twice.
    """
    return drops_of(trace_flow(read_model_file(source, file)), spec_arguments)


def drops_of(flow: Flow, spec_arguments: tuple[str, ...]) -> tuple[Drop, ...]:
    """`find_dropped_arguments` for a flow that is already known."""
    drops = [drop for carrier in flow.carriers for argument in spec_arguments for drop in _drops_in(carrier, argument)]
    drops += [drop for carrier in flow.carriers for drop in _other_names_in(carrier, spec_arguments)]
    return tuple(sorted(drops, key=lambda drop: (drop.line, drop.argument)))


def passes(carrier: Carrier, call: Call, argument: str, *, named: bool | None = None) -> bool:
    """Whether a call of a carrier hands an argument on.

    Args:
        named: whether the method has a parameter of that name, so that it is no longer among its **kwargs; None reads
            it from the method.
    """
    method = carrier.method
    named = argument in method.parameters if named is None else named
    if argument in call.keywords:
        return call.keywords[argument] != "None"
    if any(re.search(rf"\b{argument}\b", value) for value in call.positional):
        return True
    # A dict that the method fills itself, as DecoderModelForCausalLM.forward does.
    keyed = re.search(rf"""\[?['"]{argument}['"]\]?\s*[:=]""", method.text)
    through = f"**{method.swallows}" in call.starred and not named
    return through or bool(keyed and any(star.startswith("**") for star in call.starred))


def _drops_in(carrier: Carrier, argument: str) -> Iterator[Drop]:
    owner, method = carrier.owner.name, carrier.method
    unpassed = [step for step in carrier.steps if not passes(carrier, step.call, argument)]
    if argument not in method.parameters:
        if method.swallows is None:
            yield Drop(owner, method.name, method.line, carrier.level, MISSING_PARAMETER, argument)
        elif unpassed:
            yield Drop(owner, method.name, method.line, carrier.level, SWALLOWED, argument)
    for step in unpassed:
        yield Drop(owner, method.name, step.call.line, step.level, NOT_PASSED, argument, step.call.callee)


def _other_names_in(carrier: Carrier, spec_arguments: tuple[str, ...]) -> Iterator[Drop]:
    owner, method = carrier.owner.name, carrier.method
    for name in ALL_SPEC_ARGUMENTS:
        if name in spec_arguments:
            continue
        if name in method.parameters:
            yield Drop(owner, method.name, method.line, carrier.level, OTHER_RELEASE, name)
        for step in carrier.steps:
            if name in step.call.keywords:
                yield Drop(owner, method.name, step.call.line, step.level, OTHER_RELEASE, name, step.call.callee)


def trace_flow(model: ModelFile) -> Flow:
    """Find the methods on the way down to attention."""
    return _Tracer(model).trace()


class _Tracer:
    def __init__(self, model: ModelFile) -> None:
        self.classes = model.classes
        self.attention = {ATTENTION_CLASS} - set(model.classes)
        self.attention |= {name for name in model.classes if self.is_plain_attention(name)}
        # (class, method) -> its level, filled from the attention calls upwards.
        self.levels: dict[tuple[str, str], str] = {}

    def trace(self) -> Flow:
        grown = True
        while grown:
            grown = False
            for owner in self.classes.values():
                for method in owner.methods.values():
                    key = (owner.name, method.name)
                    level = self.level_of(owner, self.steps_of(owner, method))
                    if level is not None and self.levels.get(key) != level:
                        self.levels[key] = level
                        grown = True
        carriers = []
        for owner in self.classes.values():
            for method in owner.methods.values():
                steps = self.steps_of(owner, method)
                if steps:
                    carriers.append(Carrier(owner, method, self.levels[owner.name, method.name], steps))
        at = {level: [] for level in ("layer", "model", "top")}
        for (class_name, _), level in self.levels.items():
            if class_name not in at[level]:
                at[level].append(class_name)
        tops = at["top"] + [name for name in self.classes if self.descends(name, TOP_CLASS) and name not in at["top"]]
        foreign = {
            f"{name} ({owner.name}.{attribute})"
            for owner in self.classes.values()
            for attribute, constructions in owner.built.items()
            for name in frozenset().union(*constructions)
            if name.endswith("Attention") and name not in self.attention and not self.does_nothing(name)
        }
        carriers.sort(key=lambda carrier: carrier.method.line)
        return Flow(tuple(carriers), tuple(at["layer"]), tuple(at["model"]), tuple(tops), tuple(sorted(foreign)))

    def is_plain_attention(self, name: str) -> bool:
        """A local subclass of Attention that does not define a forward of its own."""
        return self.descends(name, ATTENTION_CLASS) and "forward" not in self.classes[name].methods

    def does_nothing(self, name: str) -> bool:
        """A local class whose forward takes and ignores every argument: the no-op attention of pruned models."""
        local = self.classes.get(name)
        return local is not None and "forward" in local.methods and local.methods["forward"].swallows is not None

    def descends(self, name: str, ancestor: str) -> bool:
        """Whether a class of this file derives from a class of the given name, through classes of this file."""
        local = self.classes.get(name)
        return local is not None and any(base == ancestor or self.descends(base, ancestor) for base in local.bases)

    def is_top(self, name: str) -> bool:
        local = self.classes[name]
        return self.descends(name, TOP_CLASS) or any(base in INPUT_MAKING_BASES for base in local.bases)

    def level_of(self, owner: ModelClass, steps: tuple[Step, ...]) -> str | None:
        """What runs a list of layers is a model; what runs attention, or a part of itself that does, is a layer."""
        if not steps:
            return None
        if self.is_top(owner.name):
            return "top"
        reached = {step.level for step in steps}
        if any(step.by_list for step in steps) or "model" in reached:
            return "model"
        return "layer"

    def steps_of(self, owner: ModelClass, method: Method) -> tuple[Step, ...]:
        found = (self.follow_call(owner, method, call) for call in method.calls)
        return tuple(step for step in found if step is not None)

    def follow_call(self, owner: ModelClass, method: Method, call: Call) -> Step | None:
        """The step that a call makes, None when it does not lead to attention."""
        callee = call.callee.removesuffix(".forward")
        if callee == "super()" and call.callee.endswith(".forward") and method.name == "forward":
            level = self.inherited_level(owner)
            return None if level is None else Step(call, level)
        if callee == "self.transformer" and self.descends(owner.name, TOP_CLASS):
            return Step(call, "model")
        own = re.fullmatch(r"self\.(\w+)(\[.*\])?", callee)
        if own is not None:
            return self.follow_member(owner, own[1], call, by_list=own[2] is not None)
        for over in sorted(method.loops.get(callee, ())):
            if over == "self":
                step = self.follow_element(owner, call)
            else:
                step = self.follow_member(owner, over.removeprefix("self."), call, by_list=True)
            if step is not None:
                return step
        return None

    def follow_member(self, owner: ModelClass, name: str, call: Call, by_list: bool) -> Step | None:
        """The step of `self.<name>(...)`: into a method of the class, or into an attribute's value."""
        if (owner.name, name) in self.levels:
            return Step(call, self.levels[owner.name, name])
        for holder in [owner, *(self.classes[base] for base in owner.bases if base in self.classes)]:
            built = holder.built.get(name, ())
            for mentioned in built:
                if mentioned & self.attention:
                    return None if self.is_other_kind(built, call) else Step(call, "attention")
                is_list = by_list or any(each in LIST_CLASSES or self.is_list(each) for each in mentioned)
                step = self.first_step(mentioned, call, is_list)
                if step is not None:
                    return step
        return None

    def is_other_kind(self, built: list[frozenset[str]], call: Call) -> bool:
        """Whether a call is meant for what an attribute holds instead of attention in some layers.

        Pruned models put a linear layer in the place of attention and call it with the hidden states alone
        (models/nemotron_nas/model.py, 0.14.0.dev2024100800); attention itself cannot run without the cache's lengths.
        """
        mixed = any(not mentioned & self.attention for mentioned in built)
        return mixed and not call.starred and not {"kv_cache_params", "attention_params"} & set(call.keywords)

    def follow_element(self, owner: ModelClass, call: Call) -> Step | None:
        """The step into the elements of a list class, which are named where the list is built."""
        if not self.is_list(owner.name):
            return None
        for other in self.classes.values():
            for mentioned in (each for constructions in other.built.values() for each in constructions):
                if owner.name in mentioned:
                    step = self.first_step(mentioned - {owner.name}, call, True)
                    if step is not None:
                        return step
        return None

    def first_step(self, class_names: frozenset[str], call: Call, by_list: bool) -> Step | None:
        for class_name in sorted(class_names):
            level = self.levels.get((class_name, "forward"))
            if level is not None:
                return Step(call, level, by_list)
        return None

    def is_list(self, name: str) -> bool:
        return any(self.descends(name, base) for base in LIST_CLASSES)

    def inherited_level(self, owner: ModelClass) -> str | None:
        """The level that `super().forward(...)` leads to."""
        for base in owner.bases:
            if (base, "forward") in self.levels:
                return self.levels[base, "forward"]
            if base == TOP_CLASS:
                return "model"
            if base in self.classes:
                level = self.inherited_level(self.classes[base])
                if level is not None:
                    return level
        return None
