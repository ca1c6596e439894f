"""What stands for ALiBi, put through the real kernel: against exact ALiBi, and against dropping it."""

from __future__ import annotations

import math
from typing import Any

import torch

from porting_kit.emulator.xqa import XqaKernel
from porting_kit.kernel_fit.alibi import wave_biases
from porting_kit.kernel_fit.alibi_line import AlibiFit, alibi_slopes, fit_alibi, frequencies
from porting_kit.kernel_fit.settings import DIGIT_BASE
from porting_kit.kernel_fit.written_positions import slope_parts
from porting_kit.medusa.tree import read_tree
from tests.emulator.kernel_accuracy import NODES, TREES, errors, reference_attention, tree_tensors, visible_rows

ALIBI_HEADS = 32


def rotate_waves(wave: torch.Tensor, positions: torch.Tensor, fit: AlibiFit) -> torch.Tensor:
    """Constant wave dims [H, 2P] after the rotation of each position [...], [..., H, 2P] (pair t with t + P)."""
    angle = positions[..., None].double() * torch.from_numpy(frequencies(fit.base, fit.pairs)).to(positions.device)
    cosine, sine = angle.cos()[..., None, :].float(), angle.sin()[..., None, :].float()
    first, second = wave.to(positions.device).chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def make_extra_dims(
    transform: str, content: int, size: int, length: int, name: str, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for ALiBi at places [1, N] of queries, [1, rows] of keys: [1, N, H, dims] and [1, H, rows, dims]."""
    slopes = alibi_slopes(ALIBI_HEADS)
    if transform == "write_positions":
        parts = slope_parts(slopes, size, name).to(queries.device)
        digits = torch.stack((keys // DIGIT_BASE, keys % DIGIT_BASE) * 2, dim=-1).float()
        return parts.expand(1, queries.shape[1], -1, -1), digits[:, None].expand(-1, ALIBI_HEADS, -1, -1)
    fit = fit_alibi(slopes, min((size - content) // 2, 32), length, name)
    query_wave, key_wave = wave_biases(fit, size, ALIBI_HEADS, name)
    return rotate_waves(query_wave, queries, fit), rotate_waves(key_wave, keys, fit).transpose(1, 2)


def measure_alibi(
    kernel: XqaKernel, transform: str, content: int, size: int, length: int, sharpness: float, dtype: torch.dtype
) -> dict[str, Any]:
    """ALiBi beside `content` dims, through the kernel, against exact ALiBi in float64; and dropped."""
    device, H = kernel.device, ALIBI_HEADS
    name = str(dtype).removeprefix("torch.")
    slopes = alibi_slopes(H)
    generator = torch.Generator(device).manual_seed(content)
    tree, depths = tree_tensors(read_tree(TREES[NODES]), 1, device)
    past = length - NODES
    rows = length
    pasts = torch.tensor([[past]], device=device)
    positions = torch.cat((torch.arange(past, device=device)[None], past + depths), 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Logits of standard deviation `sharpness` once divided by the square root of the content's size.
    query, keys = draw(1, NODES, H, content) * sharpness, draw(1, H, rows, content)
    values = draw(1, H, rows, size).to(dtype)
    query, keys = query.to(dtype).float(), keys.to(dtype).float()
    factor = math.sqrt(size / content)
    extra_q, extra_k = make_extra_dims(transform, content, size, length, name, past + depths, positions)
    extra = extra_q.shape[-1]
    pad_q, pad_k = (part.new_zeros(*part.shape[:-1], size - content - extra) for part in (query, keys))
    folded_q = torch.cat((extra_q, query * factor, pad_q), -1).to(dtype)
    folded_k = torch.cat((extra_k, keys, pad_k), -1).to(dtype)
    plain_q = torch.cat((torch.zeros_like(extra_q), query * factor, pad_q), -1).to(dtype)
    plain_k = torch.cat((torch.zeros_like(extra_k), keys, pad_k), -1).to(dtype)
    scale = 1 / math.sqrt(size)
    distance = (positions[:, None] - (past + depths)[:, :, None]).double()
    bias = torch.from_numpy(slopes).to(device)[None, :, None, None] * distance[:, None]
    allowed = visible_rows(tree, pasts, rows)
    wanted = reference_attention(query.double(), keys.double(), values.double(), allowed, bias)
    folded = kernel(folded_q, folded_k, values, pasts, tree, scale)
    dropped = kernel(plain_q, plain_k, values, pasts, tree, scale)
    gap, whole = ((part * part).sum((0, 1, 3)) for part in (folded.double() - wanted, wanted))
    same = reference_attention(folded_q.double(), folded_k.double(), values.double(), allowed, None)
    return {
        "transform": transform,
        "content_dims": content,
        "head_size": size,
        "extra_dims": extra,
        "length": length,
        "logit_std": sharpness,
        "dtype": name,
        **errors(folded, wanted),
        "relative_error_worst_head": float((gap / whole).max().sqrt()),
        "kernel_alone": errors(folded, same)["relative_error"],
        "dropped_relative_error": errors(dropped, wanted)["relative_error"],
    }
