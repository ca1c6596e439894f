"""Measure how well a kernel fit stands for ALiBi's line, and what that does to attention. No model is made.

Run `python -m tests.benchmarks.alibi_fit [--quick] [--json]`. Whole models: `alibi_models`.

- line: error of the attention logit where keys matter, how low far keys stay, rounding noise of float16, by head count,
  pairs and length. Heads of 64, 80 and 96 dims inside 128 leave 32, 24 and 16 pairs; 112 kept of 128 leave 8.
- attention: one layer's attention over 2,048 tokens with random content, logits of standard deviation 1 and 3, queries
  and keys in float32, float16 and bfloat16, for waves (fold_alibi) and written positions: error of the logit where the
  bias is above -20, and the total variation between the exact and the fitted distribution. The content is rounded on
  both sides, so what is left is the fit.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch

from porting_kit.kernel_fit.alibi import wave_biases
from porting_kit.kernel_fit.alibi_line import alibi_slopes, fit_alibi, frequencies
from porting_kit.kernel_fit.settings import DIGIT_BASE
from porting_kit.kernel_fit.written_positions import slope_parts
from tests.kernel_fit.attention_change import rotate_front
from tests.kernel_fit.figures import write_figures

NEAR_NATS = 20.0
LENGTH, SIZE = 2048, 128
# heads, content dims in a head of 128, factor on the slopes (Falcon divides by the square root of its head size)
SHAPES = {
    "bloom 64": (16, 64, 1.0),
    "bloom 80": (32, 80, 1.0),
    "bloom 96": (16, 96, 1.0),
    "bloom-7b1, mpt-7b: 112 of 128": (32, 112, 1.0),
    "bloom-7b1, mpt-7b: 96 of 128": (32, 96, 1.0),
    "baichuan-13b: 112 of 128": (40, 112, 1.0),
    "baichuan-13b: 96 of 128": (40, 96, 1.0),
    "falcon-rw 64": (32, 64, 64**-0.5),
}
MEASURED_DTYPES = {
    "fold_alibi": ("float32", "float16", "bfloat16"),
    "write_positions": ("bfloat16",),  # exact in float32, refused in float16
}
# query heads, pairs, length in tokens
QUICK = ((16, 16, 1024), (3, 8, 1024), (32, 8, 2048))
FULL = (
    *((16, 32, 2048), (32, 24, 2048), (32, 16, 2048), (32, 8, 2048), (32, 6, 2048), (32, 4, 2048)),
    *((40, 16, 2048), (112, 16, 2048), (16, 16, 4096), (32, 16, 8192), (32, 8, 8192), (3, 8, 1024), (3, 6, 1024)),
)


def measure_lines(cases: tuple[tuple[int, int, int], ...]) -> list[dict[str, Any]]:
    """One row a case."""
    rows = []
    for heads, pairs, length in cases:
        fit = fit_alibi(alibi_slopes(heads), pairs, length)
        rows.append(
            {
                "heads": heads,
                "pairs": pairs,
                "length_tokens": length,
                "base": fit.base,
                "error_nats": fit.error_nats,
                "floor_nats": fit.floor_nats,
                "float16_noise_nats": fit.noise_nats,
            }
        )
    return rows


def measure_attention(
    name: str, heads: int, content: int, factor: float, sharpness: float, dtype: str, transform: str, queries: int = 48
) -> dict[str, Any]:
    """One row: fitted against exact attention distributions of random content."""
    slopes = alibi_slopes(heads) * factor
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(heads + content)
    rows = torch.linspace(1, LENGTH - 1, queries).round().long()
    query = (torch.randn(heads, queries, content, generator=generator) * sharpness).to(kind).double()
    keys = torch.randn(heads, LENGTH, content, generator=generator).to(kind).double()
    logits = query @ keys.transpose(1, 2) / math.sqrt(content)
    distance = rows[:, None] - torch.arange(LENGTH)
    line = -torch.from_numpy(slopes)[:, None, None] * distance
    extra_q, extra_k = (part.to(kind).double() for part in make_extra_dims(slopes, content, dtype, transform, rows))
    fitted_line = extra_q @ extra_k.transpose(1, 2) / math.sqrt(SIZE)
    seen = distance >= 0
    near = seen & (line > -NEAR_NATS)
    gap = torch.where(near, fitted_line - line, math.nan)
    middle = (gap.nan_to_num(-math.inf).amax(-1) + gap.nan_to_num(math.inf).amin(-1)) / 2
    exact, fitted, dropped = (
        (logits + bias).masked_fill(~seen, -math.inf).softmax(-1)
        for bias in (line, fitted_line, torch.zeros_like(line))
    )
    variation, without = (0.5 * (found - exact).abs().sum(-1) for found in (fitted, dropped))
    return {
        "shape": name,
        "heads": heads,
        "transform": transform,
        "extra_dims": extra_q.shape[-1],
        "logit_std": sharpness,
        "dtype": dtype,
        "logit_error_nats": float((gap - middle[..., None]).abs().nan_to_num(0).max()),
        "total_variation_mean": float(variation.mean()),
        "total_variation_worst": float(variation.max()),
        "dropped_total_variation_mean": float(without.mean()),
    }


def make_extra_dims(
    slopes: np.ndarray, content: int, dtype: str, transform: str, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for ALiBi in the queries at `rows` and in the keys at all positions, float64 [H, rows or S, dims]."""
    heads, everywhere = len(slopes), torch.arange(LENGTH)
    if transform == "write_positions":
        digits = torch.stack((everywhere // DIGIT_BASE, everywhere % DIGIT_BASE) * 2, dim=-1).double()
        parts = slope_parts(slopes, SIZE, dtype).double()
        return parts[:, None].expand(-1, len(rows), -1), digits.expand(heads, -1, -1)
    fit = fit_alibi(slopes, min((SIZE - content) // 2, 32), LENGTH, dtype)
    biases = wave_biases(fit, SIZE, heads, dtype)
    places = (rows, everywhere)
    query, key = (rotate_waves(wave, place, fit) for wave, place in zip(biases, places, strict=True))
    return query.transpose(0, 1), key.transpose(0, 1)


def rotate_waves(wave: torch.Tensor, positions: torch.Tensor, fit: Any) -> torch.Tensor:
    """Constant wave dims [H, 2P] as the kernel rotates them at each position [S], float64 [S, H, 2P]."""
    angle = positions[:, None].double() * torch.from_numpy(frequencies(fit.base, fit.pairs))
    spread = wave.double()[:, None].expand(-1, len(positions), -1)
    return rotate_front(spread, angle).transpose(0, 1)


def format_rows(rows: list[dict[str, Any]]) -> str:
    """A table with one line a row."""
    lines = ["  ".join(f"{name:>22}" for name in rows[0])]
    lines += ["  ".join(f"{v:>22.5g}" if isinstance(v, float) else f"{v!s:>22}" for v in row.values()) for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    options = parser.parse_args()
    lines = measure_lines(QUICK if options.quick else FULL)
    shapes = list(SHAPES.items())[:1] if options.quick else SHAPES.items()
    document = {
        "line": lines,
        "attention": [
            measure_attention(name, *shape, sharpness, dtype, transform)
            for name, shape in shapes
            for sharpness in (1.0, 3.0)
            for transform, dtypes in MEASURED_DTYPES.items()
            for dtype in dtypes
        ],
    }
    if options.json:
        print(write_figures(document))
    else:
        print(*(format_rows(rows) for rows in document.values()), sep="\n\n")


if __name__ == "__main__":
    main()
