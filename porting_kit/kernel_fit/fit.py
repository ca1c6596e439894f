"""Carry out a fit plan on a checkpoint's config and tensors, and record it in the config.

Weights are changed in float32 and rounded once, to the checkpoint's type, at the end. Layers are independent, so a
converter may hand over one layer's tensors at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.errors import CheckpointError, ConversionError
from porting_kit.kernel_fit.activations import HeadMoments
from porting_kit.kernel_fit.alibi import fold_alibi
from porting_kit.kernel_fit.attention_tensors import FITTED_SUFFIXES
from porting_kit.kernel_fit.exact_transforms import Fitted, fold_scale, pad_head_size, pad_query_groups
from porting_kit.kernel_fit.note import FitNote
from porting_kit.kernel_fit.plan import FitPlan
from porting_kit.kernel_fit.truncation import truncate_heads
from porting_kit.kernel_fit.written_positions import write_positions

TRANSFORMS: Mapping[str, Callable[..., Fitted]] = {
    "fold_scale": fold_scale,
    "truncate_heads": truncate_heads,
    "write_positions": write_positions,
    "fold_alibi": fold_alibi,
    "pad_head_size": pad_head_size,
    "pad_query_groups": pad_query_groups,
}
CONFIG_KEY = "kernel_fit"


@dataclass(frozen=True)
class FittedCheckpoint:
    """A fitted model.

    Args:
        config: the checkpoint's config, with the account under `kernel_fit`.
        tensors: all tensors handed in, the attention's changed.
        notes: one per transform.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    notes: tuple[FitNote, ...]


def apply_fit(
    plan: FitPlan,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    activations: Mapping[str, HeadMoments] | None = None,
) -> FittedCheckpoint:
    """Apply a plan's steps.

    Args:
        config: the unfitted checkpoint's config.
        tensors: whole tensors of all layers, or of some.
        activations: from `measure_activations`, where the plan needs them.

    Raises:
        ConversionError: a step that does not apply, missing activations, or a value that the type cannot hold.
        CheckpointError: the config is fitted already.
    """
    if config.get(CONFIG_KEY):
        raise CheckpointError(
            "this checkpoint is fitted already",
            expected="the unfitted model",
            found=", ".join(note["transform"] for note in config[CONFIG_KEY]["notes"]),
            next_step="convert the base again",
        )
    if not plan.steps:
        return FittedCheckpoint(dict(config), dict(tensors), ())
    if plan.needs_activations and activations is None:
        raise ConversionError(
            "this fit needs activations of the unfitted model",
            expected="moments from measure_activations on calibration prompts",
            found="none",
            next_step="run the unfitted model on prompts first",
        )
    fitted = dict(config)
    names = [name for name in tensors if name.endswith(FITTED_SUFFIXES)]
    types = {tensors[name].dtype for name in names}
    working = {
        name: tensor.float() if name in names and tensor.dtype is not torch.float64 else tensor
        for name, tensor in tensors.items()
    }
    notes = []
    for step in plan.steps:
        extra = {"activations": activations} if step.name == "truncate_heads" else {}
        fitted, working, note = TRANSFORMS[step.name](fitted, working, **step.arguments, **extra)
        notes.append(note)
    for name in [name for name in working if name.endswith(FITTED_SUFFIXES)]:
        working[name] = _round(working[name], types.pop() if len(types) == 1 else tensors_type(config), name)
        types = {working[name].dtype}
    fitted[CONFIG_KEY] = record_fit(plan, notes)
    return FittedCheckpoint(fitted, working, tuple(notes))


def tensors_type(config: Mapping[str, Any]) -> torch.dtype:
    """The checkpoint's type."""
    return getattr(torch, config["dtype"])


def _round(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if not largest <= torch.finfo(dtype).max:
        raise ConversionError(
            f"{name} does not fit {str(dtype).removeprefix('torch.')} after the kernel fit",
            expected=f"values up to {torch.finfo(dtype).max:g}",
            found=f"{largest:g}",
            next_step="convert to bfloat16",
        )
    return tensor.to(dtype)


def record_fit(plan: FitPlan, notes: Sequence[FitNote]) -> dict[str, Any]:
    """What goes under `kernel_fit` in the checkpoint's config."""
    return {**plan.as_dict(), "keywords": list(plan.keywords), "notes": [note.as_dict() for note in notes]}


def merge_notes(parts: Sequence[Sequence[FitNote]]) -> tuple[FitNote, ...]:
    """One account from several layers' accounts: means are averaged, the worst of everything else is kept."""
    merged = []
    for notes in zip(*parts, strict=True):
        figures: dict[str, Any] = {}
        for name, value in notes[0].figures.items():
            values = [note.figures[name] for note in notes]
            if isinstance(value, float) and name.endswith("_mean"):
                figures[name] = math.fsum(values) / len(values)
            elif isinstance(value, float) and name.endswith("_worst"):
                figures[name] = max(values)
            else:
                figures[name] = value
        merged.append(FitNote(notes[0].transform, notes[0].exact, notes[0].what, figures))
    return tuple(merged)


def require_length(config: Mapping[str, Any], tokens: int) -> None:
    """Stop when a sequence is longer than a fitted checkpoint is right for.

    Raises:
        CheckpointError: it is.
    """
    limit = (config.get(CONFIG_KEY) or {}).get("length_tokens")
    if limit is not None and tokens > limit:
        raise CheckpointError(
            "the sequence is longer than the kernel fit reaches",
            expected=f"at most {limit} tokens, prompt and new tokens together",
            found=f"{tokens} tokens",
            next_step="raise target.max_seq_len and convert again, or shorten the prompts",
        )
