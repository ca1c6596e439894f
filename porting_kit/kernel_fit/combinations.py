"""Every combination of transforms that could apply to an attention shape, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from porting_kit.kernel_fit.fit_step import (
    APPROXIMATE,
    FEWEST_PAIRS,
    LONGEST_TOKENS,
    FitStep,
    apply_to_shape,
    changed_rows,
    find_obstacle,
    kept_dims,
    kernel_sizes,
    plan_length,
)
from porting_kit.kernel_fit.settings import ALIBI_KINDS, POSITION_DIMS, next_power_of_two
from porting_kit.releases.kernels import KernelProfile
from porting_kit.releases.shape import AttentionShape


def list_combinations(
    shape: AttentionShape, profile: KernelProfile, config: Mapping[str, Any]
) -> Iterator[tuple[FitStep, ...]]:
    """Every combination of transforms that could apply to the shape."""
    if changed_rows(config):
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
    sizes = kernel_sizes(profile, shape)
    if shape.position_kind in ALIBI_KINDS:
        for name, room in (("write_positions", POSITION_DIMS), ("fold_alibi", 2 * FEWEST_PAIRS)):
            if plan_length(shape, config) <= LONGEST_TOKENS[name] and find_obstacle(name, shape, config) is None:
                for size in sizes:
                    yield from _alibi_steps(name, room, shape, size, config)
        return
    yield ()
    for size in sizes:
        if size > shape.head_size:
            yield (FitStep("pad_head_size", {"head_size": size}),)


def _alibi_steps(
    name: str, room: int, shape: AttentionShape, size: int, config: Mapping[str, Any]
) -> Iterator[tuple[FitStep, ...]]:
    length = plan_length(shape, config)
    if size - shape.head_size >= room:
        yield (FitStep(name, {"head_size": size, "length_tokens": length}),)
    elif size == shape.head_size:
        keep = kept_dims(name, shape, config)
        yield (
            FitStep("truncate_heads", {"keep": keep}),
            FitStep(name, {"head_size": size, "length_tokens": length, "content_size": keep}),
        )


def plan_cost(shape: AttentionShape, steps: tuple[FitStep, ...]) -> tuple[int, int, int, int]:
    """Truncation, then approximation, then cache, then query heads and number of steps."""
    names = {step.name for step in steps}
    fitted = apply_to_shape(shape, steps)
    return (
        int("truncate_heads" in names),
        int(bool(names & APPROXIMATE)),
        fitted.head_size * fitted.kv_heads,
        fitted.query_heads + len(steps),
    )
