"""Which transforms make a model pass a release's kernel gates, cheapest first. No weights, no torch.

A plan is found on the attention's shape: every sensible combination of transforms is applied to the shape, the gates
judge the result, and the cheapest one that passes wins. Exact transforms come before approximate ones, a smaller KV
cache before a larger one, fewer transforms before more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from porting_kit.errors import BaseModelError
from porting_kit.kernel_fit.combinations import list_combinations, plan_cost
from porting_kit.kernel_fit.fit_step import (
    APPROXIMATE,
    CACHE_BYTES,
    KEYWORDS,
    LONGEST_TOKENS,
    FitStep,
    apply_to_shape,
    changed_rows,
    find_obstacle,
)
from porting_kit.kernel_fit.named_steps import read_named_steps, require_followed_length
from porting_kit.kernel_fit.settings import ALIBI_KINDS
from porting_kit.releases.kernels import GateResult, KernelProfile, evaluate_gates
from porting_kit.releases.shape import AttentionShape

if TYPE_CHECKING:
    from porting_kit.kernel_fit.attention_arguments import ArgumentEdit


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
        if "write_positions" not in self.names:
            return followed.source, followed.edits
        from porting_kit.kernel_fit.position_source import write_position_source

        written = write_position_source(followed.source, file=file)
        return written.source, (*followed.edits, *written.edits)

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
    return _finish(read_named_steps(wanted, shape, profile, config), shape, profile, config)


def _plan_automatically(shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]) -> FitPlan:
    if not _failing(shape, profile):
        return _finish((), shape, profile, config)
    if shape.position_kind in ALIBI_KINDS:
        longest = "write_positions" if find_obstacle("write_positions", shape, config) is None else "fold_alibi"
        require_followed_length(shape, config, longest)
    candidates = sorted(list_combinations(shape, profile, config), key=lambda steps: plan_cost(shape, steps))
    passing = [steps for steps in candidates if not _failing(apply_to_shape(shape, steps), profile)]
    if passing:
        return _finish(passing[0], shape, profile, config)
    raise _no_fit(shape, profile, config, candidates)


def _no_fit(
    shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any], candidates: list[tuple[FitStep, ...]]
) -> BaseModelError:
    closest = min(
        [(), *candidates],
        key=lambda steps: (len(_failing(apply_to_shape(shape, steps), profile)), plan_cost(shape, steps)),
    )
    left = _failing(apply_to_shape(shape, closest), profile)
    first = left[0]
    obstacle = changed_rows(config)
    if obstacle is None and shape.position_kind in ALIBI_KINDS:
        obstacle = find_obstacle("fold_alibi", shape, config)
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
    # What stands for ALiBi enlarges the head as well, and the room that truncation makes is for it.
    return (step.name in LONGEST_TOKENS and gate.name == "head size") or (
        step.name == "truncate_heads" and gate.name == "ALiBi"
    )
