"""Which transforms make a model pass a release's kernel gates, cheapest first. No weights, no torch.

A plan is found on the attention's shape: every sensible combination of transforms is applied to the shape, the gates
judge the result, and the cheapest one that passes wins. Exact transforms come before approximate ones, a smaller KV
cache before a larger one, fewer transforms before more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from porting_kit.errors import BaseModelError, PortFileError, suggest_nearest
from porting_kit.kernel_fit.settings import ALIBI_KINDS, next_power_of_two
from porting_kit.releases.kernels import GateResult, KernelProfile, evaluate_gates
from porting_kit.releases.shape import AttentionShape

if TYPE_CHECKING:
    from porting_kit.kernel_fit.attention_arguments import ArgumentEdit

ORDER = ("fold_scale", "truncate_heads", "fold_alibi", "pad_head_size", "pad_query_groups")
"""All transforms, in the order they are applied."""
APPROXIMATE = frozenset({"truncate_heads", "fold_alibi"})
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "fold_scale": ("q_scaling",),
    "truncate_heads": (),
    "fold_alibi": (
        "attention_head_size",
        "position_embedding_type",
        "max_position_embeddings",
        "rotary_embedding_percentage",
        "rotary_embedding_base",
        "bias",
        "dense_bias",
    ),
    "pad_head_size": ("attention_head_size", "rotary_embedding_percentage"),
    "pad_query_groups": ("attention_head_size",),
}
"""Arguments of the attention layer that a transform changes: the patched source takes them from the config."""
FEWEST_PAIRS = 8
"""Rotary pairs that follow ALiBi within the bound at every length of the range, with half-precision noise in reason."""
LONGEST_TOKENS = 8192
"""The longest sequence for which fold_alibi has been measured."""
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class FitStep:
    """One transform with its arguments, as `apply_fit` passes them."""

    name: str
    arguments: Mapping[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ", ".join(f"{key} {value:g}" for key, value in self.arguments.items())
        return f"{self.name} ({values})" if values else self.name


@dataclass(frozen=True)
class FitPlan:
    """What will be done to a model, and what it costs.

    Args:
        steps: in the order they are applied; empty when nothing is done.
        shape: the attention as it is; fitted: after all steps.
        gates: the target's gates on both (`mended` where a step removes one).
        length_tokens: the longest sequence the fitted model is right for; None when the fit sets no limit.
        cache_bytes_per_token: KV cache of one token over all layers, before and after.
        mends: step -> the gates it is there for.
    """

    steps: tuple[FitStep, ...]
    shape: AttentionShape
    fitted: AttentionShape
    gates: tuple[GateResult, ...] = ()
    length_tokens: int | None = None
    cache_bytes_per_token: tuple[int, int] = (0, 0)
    mends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The transforms' names."""
        return tuple(step.name for step in self.steps)

    @property
    def exact(self) -> bool:
        """Whether the fitted model computes the same function."""
        return not APPROXIMATE & set(self.names)

    @property
    def needs_activations(self) -> bool:
        """Whether calibration prompts must be run through the unfitted model first (`measure_activations`)."""
        return "truncate_heads" in self.names

    @property
    def keywords(self) -> tuple[str, ...]:
        """Arguments of the attention layer that the patched source must take from the config."""
        needed = dict.fromkeys(keyword for name in self.names for keyword in KEYWORDS[name])
        if not self.fitted.position_kind.startswith(("rope", "long_rope")):
            needed.pop("rotary_embedding_percentage", None)
        return tuple(needed)

    def for_conversion(self, activations: Mapping[str, Any] | None = None) -> Any:
        """The `fit` that `convert_checkpoint` takes; a new one for every conversion.

        Args:
            activations: from `measure_activations`, where `needs_activations` says so.
        """
        from porting_kit.kernel_fit.targets import TargetFit

        return TargetFit(self, activations)

    def follow(self, source: str, file: str = "model.py") -> tuple[str, tuple[ArgumentEdit, ...]]:
        """What `build_medusa_module` asks of a fit: the text whose attention follows the config, and the edits."""
        from porting_kit.kernel_fit.attention_arguments import follow_fit

        followed = follow_fit(source, self.keywords, file=file)
        return followed.source, followed.edits

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, without the gates."""
        return {
            "steps": [{"name": step.name, **step.arguments} for step in self.steps],
            "exact": self.exact,
            "length_tokens": self.length_tokens,
            "cache_bytes_per_token": list(self.cache_bytes_per_token),
            "mends": {name: list(gates) for name, gates in self.mends.items()},
        }

    def __str__(self) -> str:
        if not self.steps:
            return "no fit"
        before, after = self.cache_bytes_per_token
        cost = f"KV cache {before:,} to {after:,} bytes a token" if after != before else "KV cache as before"
        return f"{', '.join(map(str, self.steps))}; {'exact' if self.exact else 'approximate'}; {cost}"


def plan_fit(
    shape: AttentionShape,
    profile: KernelProfile,
    wanted: str | Sequence[str] = "auto",
    *,
    config: Mapping[str, Any] | None = None,
) -> FitPlan:
    """Choose the transforms.

    Args:
        shape: the model's attention on the target.
        profile: the release's kernels; `exact` has no gates, so `auto` does nothing there.
        wanted: "auto", "off", or names of transforms ("truncate_heads:96" keeps 96 dims).
        config: the checkpoint's config (no weights needed): number of layers, trained positions, clipping and norms
            that rule transforms out. None plans one layer.

    Raises:
        PortFileError: an unknown transform, one that cannot apply to this model, or a length beyond the fit's range.
        BaseModelError: `auto` finds no combination that passes; the message names the gate no transform mends.
    """
    config = config or {}
    if wanted == "off" or (wanted == "auto" and profile.limits is None):
        return _finish((), shape, profile, config)
    if wanted == "auto":
        return _plan_automatically(shape, profile, config)
    if isinstance(wanted, str):
        wanted = [wanted]
    return _finish(_named_steps(wanted, shape, profile, config), shape, profile, config)


def apply_to_shape(shape: AttentionShape, steps: Sequence[FitStep]) -> AttentionShape:
    """The attention's shape after the steps."""
    for step in steps:
        match step.name:
            case "fold_scale":
                shape = replace(shape, q_scaling=1.0)
            case "fold_alibi":
                shape = replace(shape, head_size=step.arguments["head_size"], position_kind="rope_gpt_neox")
            case "pad_head_size":
                shape = replace(shape, head_size=step.arguments["head_size"])
            case "pad_query_groups":
                group = shape.query_heads // shape.kv_heads
                shape = replace(shape, query_heads=shape.kv_heads * next_power_of_two(group))
    return shape


def _plan_automatically(shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]) -> FitPlan:
    if not _failing(shape, profile):
        return _finish((), shape, profile, config)
    candidates = sorted(_combinations(shape, profile, config), key=lambda steps: _cost(shape, steps))
    passing = [steps for steps in candidates if not _failing(apply_to_shape(shape, steps), profile)]
    if passing:
        return _finish(passing[0], shape, profile, config)
    raise _no_fit(shape, profile, config, candidates)


def _no_fit(
    shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any], candidates: list[tuple[FitStep, ...]]
) -> BaseModelError:
    closest = min(
        [(), *candidates],
        key=lambda steps: (len(_failing(apply_to_shape(shape, steps), profile)), _cost(shape, steps)),
    )
    left = _failing(apply_to_shape(shape, closest), profile)
    first = left[0]
    obstacle = _changed_rows(config)
    return BaseModelError(
        f"no transform makes this model pass the gate '{first.name}' of TensorRT-LLM {profile.release}",
        expected=first.expected,
        found=first.value,
        where=first.source,
        items=[gate.name for gate in left[1:]],
        next_step=f"{obstacle}: transforms cannot be used" if obstacle else first.remedy,
    )


def _failing(shape: AttentionShape, profile: KernelProfile) -> tuple[GateResult, ...]:
    return tuple(gate for gate in evaluate_gates(shape, profile) if gate.verdict in ("refused", "silent"))


def _combinations(
    shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> Iterator[tuple[FitStep, ...]]:
    """Every combination of transforms that could apply to the shape."""
    if _changed_rows(config):
        return
    scale = [FitStep("fold_scale", {"q_scaling": shape.q_scaling})] if shape.q_scaling != 1.0 else []
    group = shape.query_heads / shape.kv_heads
    groups = (
        [(), (FitStep("pad_query_groups"),)] if group.is_integer() and group != next_power_of_two(int(group)) else [()]
    )
    for heads in _head_steps(shape, profile, config):
        for padding in groups:
            if scale or heads or padding:
                yield (*scale, *heads, *padding)


def _head_steps(
    shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> Iterator[tuple[FitStep, ...]]:
    sizes = _kernel_sizes(profile, shape)
    if shape.position_kind in ALIBI_KINDS:
        if _length(shape, config) > LONGEST_TOKENS:
            return
        for size in sizes:
            yield from _alibi_steps(shape, size, config)
        return
    yield ()
    for size in sizes:
        if size > shape.head_size:
            yield (FitStep("pad_head_size", {"head_size": size}),)


def _alibi_steps(shape: AttentionShape, size: int, config: Mapping[str, Any]) -> Iterator[tuple[FitStep, ...]]:
    length = _length(shape, config)
    if size - shape.head_size >= 2 * FEWEST_PAIRS:
        yield (FitStep("fold_alibi", {"head_size": size, "length_tokens": length}),)
    elif size == shape.head_size:
        keep = size - 2 * FEWEST_PAIRS
        yield (
            FitStep("truncate_heads", {"keep": keep}),
            FitStep("fold_alibi", {"head_size": size, "length_tokens": length, "content_size": keep}),
        )


def _kernel_sizes(profile: KernelProfile, shape: AttentionShape) -> list[int]:
    """Head sizes that could have a kernel: the compiled ones, and powers of two from the head's own size on."""
    if profile.limits is None:
        return [next_power_of_two(shape.head_size), 2 * next_power_of_two(shape.head_size)]
    sizes = {kernels.head_size for kernels in profile.limits.compiled}
    return sorted(size for size in sizes if size >= shape.head_size)


def _cost(shape: AttentionShape, steps: tuple[FitStep, ...]) -> tuple[int, int, int, int]:
    """Truncation, then approximation, then cache, then query heads and number of steps."""
    names = {step.name for step in steps}
    fitted = apply_to_shape(shape, steps)
    return (
        int("truncate_heads" in names),
        int(bool(names & APPROXIMATE)),
        fitted.head_size * fitted.kv_heads,
        fitted.query_heads + len(steps),
    )


def _length(shape: AttentionShape, config: Mapping[str, Any]) -> int:
    return int(shape.max_seq_len or config.get("max_position_embeddings") or 2048)


def _changed_rows(config: Mapping[str, Any]) -> str | None:
    """What happens to queries and keys between projection and kernel, None when nothing does."""
    if config.get("clip_qkv") is not None:
        return f"the model clips its projections (clip_qkv {config['clip_qkv']:g})"
    if config.get("qk_layernorm"):
        return "the model normalises queries and keys (qk_layernorm)"
    return None


def _named_steps(
    wanted: Sequence[str], shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> tuple[FitStep, ...]:
    """The steps a user asked for by name, each checked against the model."""
    asked: dict[str, str] = {}
    for text in wanted:
        name, _, value = str(text).partition(":")
        if name not in ORDER:
            near = suggest_nearest(name, ORDER)
            raise PortFileError(
                f"unknown transform {name!r} in fit",
                expected=f"names among {', '.join(ORDER)}, or auto, or off",
                found=str(text),
                next_step=f"did you mean {near}?" if near else "see the list of transforms",
            )
        if value and (name != "truncate_heads" or not value.isdecimal()):
            raise PortFileError(
                f"{name} takes no such value",
                expected="truncate_heads:<dims to keep>; the other transforms take none",
                found=str(text),
            )
        asked[name] = value
    obstacle = _changed_rows(config)
    if asked and obstacle:
        raise _cannot_apply(next(iter(asked)), obstacle)
    steps: list[FitStep] = []
    for name in ORDER:
        if name in asked:
            steps.append(_named_step(name, asked, apply_to_shape(shape, steps), profile, config))
    return tuple(steps)


def _named_step(
    name: str, asked: Mapping[str, str], shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> FitStep:
    sizes = _kernel_sizes(profile, shape)
    is_alibi = shape.position_kind in ALIBI_KINDS
    keep = int(asked["truncate_heads"] or shape.head_size - 2 * FEWEST_PAIRS) if "truncate_heads" in asked else None
    if name == "fold_scale":
        if shape.q_scaling == 1.0:
            raise _cannot_apply(name, "its q_scaling is 1")
        return FitStep(name, {"q_scaling": shape.q_scaling})
    if name == "truncate_heads":
        if not is_alibi:
            raise _cannot_apply(
                name, f"its positions are {shape.position_kind}: rotated queries and keys have no free basis"
            )
        if "fold_alibi" not in asked:
            raise _cannot_apply(name, "nothing uses the room it makes", "add fold_alibi")
        if not 8 <= keep <= shape.head_size - 8:
            raise _cannot_apply(name, f"it cannot keep {keep} of {shape.head_size} dims", "keep 8 to D - 8 dims")
        return FitStep(name, {"keep": keep})
    if name == "fold_alibi":
        return _named_alibi(shape, sizes, keep, config, is_alibi)
    if name == "pad_head_size":
        larger = [size for size in sizes if size > shape.head_size]
        if not larger:
            raise _cannot_apply(name, f"no kernel is there for heads larger than its {shape.head_size}")
        if is_alibi:
            raise _cannot_apply(name, "its positions are ALiBi", "use fold_alibi, which enlarges the head itself")
        return FitStep(name, {"head_size": larger[0]})
    group = shape.query_heads / shape.kv_heads
    if not group.is_integer() or int(group) == next_power_of_two(int(group)):
        raise _cannot_apply(name, f"its query groups are {group:g}, a power of two")
    if is_alibi:
        raise _cannot_apply(name, "its slopes follow the number of heads", "add fold_alibi")
    return FitStep(name)


def _named_alibi(
    shape: AttentionShape, sizes: list[int], keep: int | None, config: Mapping[str, Any], is_alibi: bool
) -> FitStep:
    if not is_alibi:
        raise _cannot_apply("fold_alibi", f"its positions are {shape.position_kind}")
    length = _length(shape, config)
    if length > LONGEST_TOKENS:
        raise PortFileError(
            "the sequences are longer than fold_alibi can follow",
            expected=f"max_seq_len up to {LONGEST_TOKENS}",
            found=str(length),
            where="target.max_seq_len, or the model's trained positions when it is not set",
            next_step=f"set target.max_seq_len to at most {LONGEST_TOKENS}",
        )
    content = keep or shape.head_size
    room = [size for size in sizes if size >= shape.head_size and size - content >= 8]
    if not room:
        raise _cannot_apply(
            "fold_alibi", f"its {shape.head_size} dims leave no room in a kernel's head", "add truncate_heads"
        )
    arguments: dict[str, int | float] = {"head_size": room[0], "length_tokens": length}
    if keep is not None:
        arguments["content_size"] = keep
    return FitStep("fold_alibi", arguments)


def _cannot_apply(name: str, why: str, next_step: str = "remove it from fit, or use fit: auto") -> PortFileError:
    return PortFileError(
        f"the transform {name} cannot be applied to this model", found=why, where="fit", next_step=next_step
    )


def _finish(
    steps: tuple[FitStep, ...], shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> FitPlan:
    fitted = apply_to_shape(shape, steps)
    layers = int(config.get("num_hidden_layers") or 1)
    size = 2 * layers * shape.kv_heads * CACHE_BYTES[shape.cache_dtype]
    lengths = [int(step.arguments["length_tokens"]) for step in steps if "length_tokens" in step.arguments]
    gates = evaluate_gates(shape, profile, fitted=fitted) if profile.limits is not None else ()
    mended = [gate for gate in gates if gate.verdict == "mended"]
    return FitPlan(
        steps=steps,
        shape=shape,
        fitted=fitted,
        gates=gates,
        length_tokens=min(lengths) if lengths else None,
        cache_bytes_per_token=(size * shape.head_size, size * fitted.head_size),
        mends={step.name: tuple(gate.name for gate in mended if _helps(step, gate)) for step in steps},
    )


def _helps(step: FitStep, gate: GateResult) -> bool:
    if step.name in gate.mended_by:
        return True
    # fold_alibi enlarges the head as well, and the room that truncation makes is for fold_alibi.
    return (step.name == "fold_alibi" and gate.name == "head size") or (
        step.name == "truncate_heads" and gate.name == "ALiBi"
    )
