"""The transforms a user asked for by name, each checked against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from porting_kit.errors import PortFileError, suggest_nearest
from porting_kit.kernel_fit.fit_step import (
    LONGEST_TOKENS,
    ORDER,
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

ROOM = {"write_positions": POSITION_DIMS, "fold_alibi": 8}
"""Dims that each transform that stands for ALiBi needs, at least."""


def read_named_steps(
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
                next_step="correct the step in fit",
            )
        asked[name] = value
    if len(ROOM.keys() & asked.keys()) > 1:
        raise _cannot_apply("fold_alibi", "write_positions stands for ALiBi already", "name one of the two")
    obstacle = changed_rows(config)
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
    sizes = kernel_sizes(profile, shape)
    is_alibi = shape.position_kind in ALIBI_KINDS
    carrier = next((each for each in LONGEST_TOKENS if each in asked), "fold_alibi")
    keep = int(asked["truncate_heads"] or kept_dims(carrier, shape, config)) if "truncate_heads" in asked else None
    if name == "fold_scale":
        if shape.q_scaling == 1.0:
            raise _cannot_apply(name, "its q_scaling is 1")
        return FitStep(name, {"q_scaling": shape.q_scaling})
    if name == "truncate_heads":
        if not is_alibi:
            raise _cannot_apply(
                name, f"its positions are {shape.position_kind}: rotated queries and keys have no free basis"
            )
        if carrier not in asked:
            raise _cannot_apply(name, "nothing uses the room it makes", "add fold_alibi or write_positions")
        room = ROOM[carrier]
        if not 8 <= keep <= shape.head_size - room:
            raise _cannot_apply(name, f"it cannot keep {keep} of {shape.head_size} dims", f"keep 8 to D - {room} dims")
        return FitStep(name, {"keep": keep})
    if name in ROOM:
        return _named_alibi(name, shape, sizes, keep, config, is_alibi)
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
    name: str, shape: AttentionShape, sizes: list[int], keep: int | None, config: Mapping[str, Any], is_alibi: bool
) -> FitStep:
    if not is_alibi:
        raise _cannot_apply(name, f"its positions are {shape.position_kind}")
    obstacle = find_obstacle(name, shape, config)
    if obstacle:
        raise _cannot_apply(
            name, obstacle, "use fit: auto, or another dtype, target.kv_cache_type: auto, target.pp_size: 1"
        )
    length = require_followed_length(shape, config, name)
    content = keep or shape.head_size
    room = [size for size in sizes if size >= shape.head_size and size - content >= ROOM[name]]
    if not room:
        raise _cannot_apply(name, f"its {shape.head_size} dims leave no room in a kernel's head", "add truncate_heads")
    arguments: dict[str, int | float] = {"head_size": room[0], "length_tokens": length}
    if keep is not None:
        arguments["content_size"] = keep
    return FitStep(name, arguments)


def require_followed_length(shape: AttentionShape, config: Mapping[str, Any], name: str) -> int:
    """The longest sequence, in tokens, that a transform must follow ALiBi over.

    Raises:
        PortFileError: longer than it has been measured for.
    """
    length = plan_length(shape, config)
    longest = LONGEST_TOKENS[name]
    if length > longest:
        raise PortFileError(
            f"the sequences are longer than {name} can follow",
            expected=f"max_seq_len up to {longest}",
            found=str(length),
            where="target.max_seq_len, or the model's trained positions when it is not set",
            next_step=f"set target.max_seq_len to at most {longest}",
        )
    return length


def _cannot_apply(name: str, why: str, next_step: str = "remove it from fit, or use fit: auto") -> PortFileError:
    return PortFileError(
        f"the transform {name} cannot be applied to this model",
        expected="a model that the transform is for",
        found=why,
        where="fit",
        next_step=next_step,
    )
