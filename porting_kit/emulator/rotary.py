"""Rotary position embedding as gpt_attention applies it.

The table that a release's own Python hands over is used where there is one (its scaling, its mscale, its mistakes);
releases without a table, and positions behind its end, are computed from base, dimension and scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.emulator.attention_step import AttentionStep
from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor

NEOX_KINDS = frozenset({"rope_gpt_neox", "long_rope"})
GPTJ_KINDS = frozenset({"rope_gptj"})


@dataclass(frozen=True)
class RotarySetting:
    """Rotary arguments of one gpt_attention call.

    Args:
        kind: name of the position embedding type.
        dim: rotated dimensions of a head.
        base: rotary base (theta).
        scale_type: "none", "linear", "dynamic" or "llama3".
        scale: factor of linear and dynamic scaling.
        max_positions: trained positions, from which dynamic scaling starts.
        mscale: factor on cos and sin that a table already contains.
        table: the release's cos/sin table, any shape whose elements are [P, dim/2, 2] in order; or None.
        inverse_frequencies: float32 [dim/2], for positions behind the table; or None.
        scaling_factors: per-frequency divisors of long rope, [dim/2]; or None.
    """

    kind: str
    dim: int
    base: float
    scale_type: str
    scale: float
    max_positions: int
    mscale: float = 1.0
    table: torch.Tensor | None = None
    inverse_frequencies: torch.Tensor | None = None
    scaling_factors: torch.Tensor | None = None


def read_rotary_setting(arguments: dict[str, Any], longest: int) -> RotarySetting | None:
    """The rotary arguments of a gpt_attention call of any release; None for a model without rotary embedding.

    Args:
        arguments: the call's arguments.
        longest: tokens of the longest request after the step.
    """
    kind = arguments["position_embedding_type"].name
    dim = int(arguments.get("rotary_embedding_dim") or 0)
    if dim == 0 or kind not in NEOX_KINDS | GPTJ_KINDS:
        if dim and kind not in ("chatglm", "alibi", "alibi_with_scale", "learned_absolute", "relative"):
            raise_not_emulated(f"position embedding type {kind}")
        return None

    def read_tensor(name: str) -> torch.Tensor | None:
        value = arguments.get(name)
        return value.data if isinstance(value, Tensor) else None

    long_mscale = arguments.get("rotary_embedding_long_m_scale")
    prefix = ""
    # Late releases hand over both tables of long rope, and the kernel chooses.
    original = arguments.get("rotary_embedding_original_max_positions")
    if kind == "long_rope" and arguments.get("long_rope_rotary_cos_sin") is not None and longest > int(original):
        prefix = "long_rope_"
    return RotarySetting(
        kind=kind,
        dim=dim,
        base=float(arguments.get("rotary_embedding_base", 10000.0)),
        scale_type=getattr(arguments.get("rotary_embedding_scale_type"), "name", "none"),
        scale=float(arguments.get("rotary_embedding_scale", 1.0)),
        max_positions=int(arguments.get("rotary_embedding_max_positions", 1024)),
        mscale=float(long_mscale) if kind == "long_rope" and long_mscale else 1.0,
        table=read_tensor(f"{prefix}rotary_cos_sin"),
        inverse_frequencies=read_tensor(f"{prefix}rotary_inv_freq"),
        scaling_factors=read_tensor("rotary_embedding_scaling_factors"),
    )


def find_cos_sin(
    step: AttentionStep, setting: RotarySetting, positions: torch.Tensor, lengths: Sequence[int], ends: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the step's tokens, each float [T, 1, dim/2].

    Args:
        step: the step, which remembers them for the other layers.
        setting: the layer's rotary arguments.
        positions: int64 [T].
        lengths: tokens of each request in the step.
        ends: tokens each request has after the step; dynamic scaling depends on it.
    """
    table = setting.table
    key = (
        "rotary",
        setting.kind,
        setting.dim,
        setting.base,
        setting.scale_type,
        setting.scale,
        setting.mscale,
        None if table is None else (table.data_ptr(), table.numel()),
        id(positions),
    )

    if step.is_recorded and (setting.scale_type == "dynamic" or setting.kind == "long_rope"):
        raise_not_emulated("recording of rotary embedding that depends on the length of the sequence")

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        half = setting.dim // 2
        rows = 0 if table is None else table.numel() // setting.dim
        # Dynamic scaling depends on the length of the sequence, which no table knows.
        is_within = max(ends) <= rows or (not step.is_recorded and int(positions.max()) < rows)
        is_tabulated = setting.scale_type != "dynamic" and rows > 0 and is_within
        if is_tabulated:
            pairs = table.reshape(-1)[: rows * setting.dim].view(rows, half, 2)[positions]
            return pairs[..., 0].unsqueeze(1), pairs[..., 1].unsqueeze(1)
        if setting.scale_type == "dynamic":
            rows_of = [compute_frequencies(setting, end, positions.device) for end in ends]
            counts = torch.tensor(list(lengths), device=positions.device)
            frequencies = torch.stack(rows_of).repeat_interleave(counts, dim=0)
        else:
            frequencies = compute_frequencies(setting, 0, positions.device)
        angles = (positions.unsqueeze(1).to(frequencies.dtype) * frequencies).unsqueeze(1)
        return angles.cos() * setting.mscale, angles.sin() * setting.mscale

    return step.remember(key, (table, positions), make)


def compute_frequencies(setting: RotarySetting, sequence_end: int, device: torch.device) -> torch.Tensor:
    """Inverse frequencies, float32 [dim/2].

    Linear scaling divides positions; dynamic scaling grows the base once a sequence is longer than the trained
    positions, as transformers' dynamic NTK does and the generation kernel with it
    (decoderMaskedMultiheadAttentionUtils.h, update_rotary_base_n_scale, 0.11.0.dev2024062500).
    """
    if setting.inverse_frequencies is not None and setting.scale_type != "dynamic":
        return setting.inverse_frequencies.reshape(-1).to(device)
    base, dim = setting.base, setting.dim
    if setting.scale_type == "dynamic" and sequence_end > setting.max_positions:
        growth = setting.scale * sequence_end / setting.max_positions - (setting.scale - 1)
        base = base * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(torch.float32) / dim
    frequencies = 1.0 / base**exponents
    if setting.scale_type == "linear":
        frequencies = frequencies / setting.scale
    elif setting.scale_type == "llama3":
        raise_not_emulated("llama3 rotary scaling behind the end of the release's own table")
    if setting.scaling_factors is not None:
        frequencies = frequencies / setting.scaling_factors.reshape(-1).to(device)
    return frequencies


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: str) -> torch.Tensor:
    """Rotate the first dimensions of each head.

    Args:
        heads: [T, heads, D], any float type; half types are rotated in float32, as the kernels do.
        cos, sin: [T, 1, dim/2].
        kind: the position embedding type's name; neox pairs dimension i with i + dim/2, gptj with i + 1.

    Returns:
        [T, heads, D] in the type of `heads`.
    """
    half = cos.shape[-1]
    dim = 2 * half
    working = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    cos, sin = cos.to(working.dtype), sin.to(working.dtype)
    if kind in NEOX_KINDS:
        first, second = working[..., :half], working[..., half:dim]
        parts = [first * cos - second * sin, second * cos + first * sin]
        rotated = torch.cat([*parts, working[..., dim:]] if dim < heads.shape[-1] else parts, dim=-1)
    else:
        first, second = working[..., 0:dim:2], working[..., 1:dim:2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        if dim < heads.shape[-1]:
            rotated = torch.cat((rotated, working[..., dim:]), dim=-1)
    return rotated.to(heads.dtype)
