"""What a model family is, and how a Hugging Face config finds its own.

A family is recognised by the class name in `architectures` first, by `model_type` second, and by the tensors when
neither is known: fine-tunes often carry a `model_type` of their own, and a name alone has sent Qwen models down
LLaMA's path before. This module does not read files.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from porting_kit.architectures.fields import COMMON_FIELDS, Field
from porting_kit.architectures.names import match_name
from porting_kit.architectures.releases import release_key
from porting_kit.architectures.rules import Drop, Rule, condition_terms
from porting_kit.errors import BaseModelError, suggest_nearest

Derive = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, tuple[Any, str]]]
POSITION_KINDS = ("rope_gpt_neox", "rope_gptj", "long_rope", "alibi", "alibi_with_scale", "learned_absolute", "chatglm")


@dataclass(frozen=True)
class ByKey:
    """A trait that a key of the Hugging Face config decides: ALiBi or rotary in Falcon."""

    key: str
    values: Mapping[object, str]
    default: object

    def resolve(self, raw: Mapping[str, object]) -> str:
        """The trait's value; BaseModelError when the config holds a value that is not listed."""
        found = raw.get(self.key, self.default)
        if found not in self.values:
            raise BaseModelError(
                f"config key {self.key!r} has a value this family does not know",
                expected=f"one of {sorted(self.values, key=str)}",
                found=repr(found),
                next_step=f"correct {self.key} in config.json",
            )
        return self.values[found]


@dataclass(frozen=True)
class Switch:
    """A yes or no that decides which weight rules apply.

    Args:
        keys: spellings in the Hugging Face config, dotted for nested ones.
        default: value when the config is silent and the tensors are not known.
        evidence: name of a tensor whose presence means yes when the config is silent.
        negated: the key says the opposite ("no_bias").
        since, until: the release decides: true from the one on and before the other; `default` without a release.
    """

    keys: tuple[str, ...] = ()
    default: bool = False
    evidence: str | None = None
    negated: bool = False
    since: str | None = None
    until: str | None = None

    def holds_for(self, release: tuple[int, ...]) -> bool:
        """Whether a release (as a sortable key) lies from `since` on and before `until`."""
        after = self.since is None or release >= release_key(self.since)
        return after and (self.until is None or release < release_key(self.until))


@dataclass(frozen=True)
class Requirement:
    """A key of the Hugging Face config that TensorRT-LLM's class cannot follow unless it has one of these values.

    Args:
        key: the key, dotted for nested ones; "@name" is the BaseConfig attribute, whatever its spelling.
        allowed: values ("=4*E" is worked out from the model's sizes) that the class computes as the source does.
        default: value when the key is absent.
        effect: what would go wrong.
        source: upstream file and release.
    """

    key: str
    allowed: tuple[object, ...]
    default: object
    effect: str
    source: str


@dataclass(frozen=True)
class Refusal:
    """A requirement that a model does not meet."""

    key: str
    value: object
    effect: str
    source: str


@dataclass(frozen=True)
class SettingSince:
    """A value of the Hugging Face config that TensorRT-LLM's class follows from a release on.

    Args:
        key: the config key.
        values: the values that need the release.
        what: what the older class lacks.
        since: the first release that has it.
    """

    key: str
    values: tuple[object, ...]
    what: str
    since: str


@dataclass(frozen=True)
class LayerTraits:
    """What one layer has of its own, in families whose layers differ.

    Args:
        sizes: letter -> size, in place of the model's.
        switches: switch -> value, in place of the model's.
        written: the layer's entry in the checkpoint's config.json.
    """

    sizes: Mapping[str, int]
    switches: Mapping[str, bool]
    written: Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A place where TensorRT-LLM and Hugging Face compute different numbers from the same weights, by design.

    Args:
        name: short name, used in verdicts.
        effect: what differs and by how much it was measured.
        source: upstream file and release.
        releases: which releases show it.
        before: the first release without it, where later ones are right: then it is a fault of the release.
        position_kind: only models with these positions (or a kind of them) show it; all when None.
        half_only: only a port in half precision shows it.
        reference: config change that makes the Hugging Face reference compute what TensorRT-LLM computes, if one does.
    """

    name: str
    effect: str
    source: str
    releases: str = "all"
    before: str | None = None
    position_kind: str | None = None
    half_only: bool = False
    reference: Mapping[str, object] = field(default_factory=dict)


GELU_IS_TANH = Difference(
    name="gelu is tanh",
    effect="the activation named gelu is the tanh form (the erf form differs by 2e-4 of the largest logit)",
    source="tensorrt_llm/functional.py 0.11.0.dev2024062500, gelu",
    reference={"hidden_act": "gelu_pytorch_tanh"},
)
NORM_EPS_FIXED = Difference(
    name="norm epsilon is 1e-5",
    effect="the layers use 1e-5 whatever norm_epsilon says; nothing at 1e-5, up to 5e-2 of the largest logit at 5e-2",
    source="tensorrt_llm/models/{bloom,gptneox,opt,phi,gptj,mpt,falcon}/model.py, 0.9 to 0.14",
    reference={"norm_eps": 1e-5},
)
ALIBI_SLOPES_CAST = Difference(
    name="ALiBi slopes in the hidden dtype",
    effect="slopes are rounded to the model's dtype (bias error at distance 2048: 0.005 in fp16, 0.06 in bf16)",
    source="tensorrt_llm/layers/attention.py 0.11.0.dev2024062500",
    position_kind="alibi",
    half_only=True,
)


@dataclass(frozen=True)
class Family:
    """One model family: names, weight rules, config fields, traits.

    Args:
        name: short name, also of the module.
        model_types: `model_type` values.
        architectures: class name in the Hugging Face config -> architecture name in TensorRT-LLM's MODEL_MAP.
        model_folder: folder under tensorrt_llm/models.
        rules: weight rules; together with `drops` they account for every tensor.
        fields: rows beyond the common ones; a row with the same target replaces the common one.
        position, norm, mlp, qkv: traits; `qkv` says how queries, keys and values lie in the source.
        drops: source tensors the checkpoint does without.
        switches: what decides `Rule.when`.
        requirements: what the class cannot follow.
        differences: inherent differences from Hugging Face.
        spellings: config keys that replace the general ones for an attribute, in order of precedence.
        defaults: values of attributes the config may leave out, as a value or a shape expression text.
        derive: attributes and switches this family computes: takes the raw config and the attributes read so far,
            returns {name: (value, how)}; "refuse:key" refuses a setting that no list of values can describe.
        handled_keys: keys whose meaning the rules already carry, not to be reported as dropped.
        pipeline: the class can be split over pipeline ranks.
        first_release: first release whose MODEL_MAP holds it.
        ranks_since: first release that reads one file per tensor-parallel rank; None when all do.
        broken: (first release, first sound one again, why) where the class itself cannot be built.
        renamed: (release, older name): the architecture's name in releases before that one.
        head_size_since: first release whose class takes a head size other than E / H; None when none does.
        settings_since: config values that older releases do not follow.
        rope_scaling_since: first release whose class scales rotary positions, where that is later than the release's.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: Mapping[str, str]
    model_folder: str
    rules: tuple[Rule, ...]
    position: str | ByKey
    norm: str
    mlp: str
    qkv: str
    fields: tuple[Field, ...] = ()
    drops: tuple[Drop, ...] = ()
    switches: Mapping[str, Switch] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    differences: tuple[Difference, ...] = ()
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    derive: Derive | None = None
    handled_keys: tuple[str, ...] = ()
    pipeline: bool = False
    first_release: str = "0.8.0"
    head_size_since: str | None = None
    settings_since: tuple[SettingSince, ...] = ()
    rope_scaling_since: str | None = None
    ranks_since: str | None = None
    renamed: tuple[str, str] | None = None
    broken: tuple[tuple[str, str, str], ...] = ()

    def __post_init__(self) -> None:
        targets = [rule.target for rule in self.rules]
        for target in targets:
            same = [rule for rule in self.rules if rule.target == target]
            if len(same) > 1 and len({(rule.when, rule.layers) for rule in same}) < len(same):
                raise ValueError(f"family {self.name}: two rules write {target!r} under the same condition")
        for rule in self.rules:
            if any(name not in self.switches for name, _ in condition_terms(rule.when)):
                raise ValueError(f"family {self.name}: rule for {rule.target!r} asks for unknown switch {rule.when!r}")
        for row in self.fields:
            if any(name not in self.switches for name, _ in condition_terms(row.when)):
                raise ValueError(f"family {self.name}: field {row.target!r} asks for unknown switch {row.when!r}")
        kinds = self.position.values.values() if isinstance(self.position, ByKey) else (self.position,)
        if unknown := [kind for kind in kinds if kind not in POSITION_KINDS]:
            raise ValueError(f"family {self.name}: unknown position kinds {unknown}")
        if self.norm not in ("rms", "layer") or self.mlp not in ("plain", "gated", "experts"):
            raise ValueError(f"family {self.name}: norm {self.norm!r} or mlp {self.mlp!r} is not a known kind")

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """Common rows and the family's own; the family's replace common rows of the same target."""
        own = {row.target for row in self.fields}
        return tuple(row for row in COMMON_FIELDS if row.target not in own) + self.fields

    def explains(self, names: Collection[str]) -> float:
        """Share of these source tensor names that the rules and drops know, 0 to 1."""
        patterns = {source.name for rule in self.rules for source in rule.sources} | {d.pattern for d in self.drops}
        if not names:
            return 0.0
        return sum(any(match_name(pattern, name) is not None for pattern in patterns) for name in names) / len(names)


# Families of the user's own files, by name; see family_file.
EXTRA_FAMILIES: dict[str, Family] = {}


@lru_cache(maxsize=1)
def load_families() -> dict[str, Family]:
    """Every family by name, from the modules in `families/` and the files that were named. Each cites its sources."""
    package = importlib.import_module("porting_kit.architectures.families")
    found: dict[str, Family] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        family = module.FAMILY
        if family.name != module_info.name:
            raise ValueError(f"module {module_info.name!r} holds the family {family.name!r}: the names must agree")
        found[family.name] = family
    return {**found, **EXTRA_FAMILIES}


def find_family(raw: Mapping[str, object], tensor_names: Collection[str] | None = None) -> Family:
    """The family of a Hugging Face config.

    Args:
        raw: the config.json as a dict (text part, when the model has several).
        tensor_names: names in the weight files; used when neither class name nor model_type is known, and to refuse a
            name that the tensors contradict.

    Raises:
        BaseModelError: no family fits, or the config's names point to two families.
    """
    families = load_families()
    classes = [str(name) for name in raw.get("architectures") or ()]
    model_type = raw.get("model_type")
    by_class = [f for f in families.values() if any(name in f.architectures for name in classes)]
    by_type = [f for f in families.values() if model_type in f.model_types]
    if len(by_class) == 1:
        return by_class[0]
    if len(by_class) > 1:
        narrowed = [f for f in by_class if f in by_type]
        if len(narrowed) == 1:
            return narrowed[0]
        raise BaseModelError(
            "the config names classes of several families",
            expected="classes of one family",
            found=f"architectures {classes}",
            items=[f.name for f in by_class],
            next_step="leave one class in `architectures`",
        )
    if len(by_type) == 1:
        return by_type[0]
    if tensor_names:
        scores = sorted(((f.explains(tensor_names), f.name) for f in families.values()), reverse=True)
        complete = [name for score, name in scores if score == 1.0]
        if len(complete) == 1:
            return families[complete[0]]
    known = sorted(name for f in families.values() for name in f.architectures)
    near = suggest_nearest(classes[0] if classes else str(model_type), known)
    raise BaseModelError(
        "no known model family fits this config",
        expected="a class name in `architectures` or a `model_type` of a known family",
        found=f"architectures {classes or None}, model_type {model_type!r}",
        items=sorted(families),
        next_step=f"the nearest known class is {near}; " * bool(near)
        + "a new family is one file, named in the port file's `architecture_file`",
    )
