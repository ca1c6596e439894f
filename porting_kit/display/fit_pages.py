"""The pages that show measured figures of kernels and fits, and their pictures, written from committed figures.

`python -m porting_kit.display.fit_pages` reads `xqa.json`, `alibi_fit.json` and `alibi_models.json` in
`notebooks/howto/figures/` (what `python -m tests.benchmarks.xqa --json` and so on print) and writes the pages
`real_kernel.md` and `fit_figures.md` and the pictures of `making_bloom_work.md`. The pages hold nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from porting_kit.display.fit_plots import plot_alibi_line, plot_attention_change
from porting_kit.display.kernel_page import format_number, markdown_table, write_kernel_page
from porting_kit.display.plots import Picture
from porting_kit.kernel_fit.alibi_line import FLOOR_NATS, alibi_slopes, fit_alibi

HOWTO = Path("notebooks/howto")
FIGURES = "figures"
NAMES = ("xqa", "alibi_fit", "alibi_models")
HEADS, PAIRS, LENGTH = 32, 8, 2048
"""Bloom-7b1's heads, and the pairs that 112 of 128 kept dims leave."""
SHOWN_HEADS = (1, 8, 16, 32)

FIT_HEAD = """# How close the ALiBi fit is

How well the transforms stand for ALiBi, at which head size, in which type, and where they do not.

Two stand for it: `fold_alibi` (rotary waves) and `write_positions` (positions in the keys). `fit: auto` takes the
second in bfloat16 and the first in float16; why, and what follows from the figures, is said in
[Making Bloom work](making_bloom_work.md). Measured by `python -m tests.benchmarks.alibi_fit` and
`python -m tests.benchmarks.alibi_models --source TREE` with the tree of 0.11.0.dev2024062500.
"""


def write_fit_page(line: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """The page of the fit's figures as Markdown.

    Args:
        line: what `alibi_fit` measured; models: what `alibi_models` did.
    """
    sections = [
        FIT_HEAD.rstrip(),
        _write_attention(line["attention"]),
        _write_families(models["families"]),
        _write_trained(models["trained"], models["training"]),
    ]
    return "\n\n".join(sections) + "\n"


def _write_attention(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(row["shape"], row["heads"], f"`{row['transform']}`", row["extra_dims"], f"{row['logit_std']:g}"),
            *(row["dtype"], format_number(row["logit_error_nats"]), format_number(row["total_variation_mean"])),
            *(format_number(row["total_variation_worst"]), format_number(row["dropped_total_variation_mean"])),
        )
        for row in rows
    ]
    names = (
        *("shape", "heads", "transform", "extra dims", "logit spread", "type", "logit error"),
        *("total variation, mean", "worst", "dropped, mean"),
    )
    return (
        "## The attention logit and the attention distribution\n\n"
        "2,048 tokens, random content whose logits have the spread given (3 is three times sharper than a random\n"
        "model's). *Logit error*: largest error of the bias where it is above -20 nats, rounding in the type\n"
        "included; the bound is 0.025. *Total variation*: how much of the attention moves to other keys, between 0\n"
        "and 1; *dropped* is the same for a kernel that leaves ALiBi out. Written positions are exact in float32 and\n"
        "refused in float16.\n\n" + markdown_table(names, table)
    )


def _write_families(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(
                row["family"],
                f"{row['heads']} x {row['head_size']}",
                f"{row['sharpness']:g}",
                f"{row['length_tokens']:,}",
            ),
            *(f"`{row['transform']}`", row["kept_dims"] or "all", row["dtype"]),
            *(format_number(row[f"{name}_relative_logit_error"]) for name in ("fitted", "unfitted")),
            *(f"{row[f'{name}_greedy_agreement']:.0%}" for name in ("fitted", "unfitted")),
            *(format_number(row[f"{name}_total_variation_mean"]) for name in ("fitted", "unfitted")),
        )
        for row in rows
    ]
    names = (
        *("family", "heads", "sharper", "tokens", "transform", "kept dims", "type", "logit error, fitted", "unfitted"),
        *("greedy tokens, fitted", "unfitted", "total variation, fitted", "unfitted"),
    )
    return (
        "## Whole models against Hugging Face\n\n"
        "Random models with the real head counts and head sizes, two layers (one where they are wider than 2,048),\n"
        "99 words; prompts up to the fitted length, greedy tokens after each. Errors are of the largest logit; total\n"
        "variation is against the exact distributions in float32. *Unfitted* is the same model in the same type with\n"
        "exact ALiBi: what half precision costs alone. A random model's best tokens are nearly tied, so in bfloat16\n"
        "their agreement says little, with or without a fit. With 99 words in one layer, heads of 128 dims use fewer\n"
        "than 112, so that truncating them costs nothing here: the table below is about that. Falcon's reference\n"
        "keeps its ALiBi in float32; Hugging Face itself rounds it to bfloat16, and at 2,048 tokens is 21 % of the\n"
        "largest logit away from it. A row is missing where the conversion refuses: 8 pairs in bfloat16 over\n"
        "2,048 tokens.\n\n" + markdown_table(names, table)
    )


def _write_trained(rows: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> str:
    table = [
        (
            *(row["base"], f"`{row['transform']}`", row["kept_dims"], row["dtype"]),
            f"{row['discarded_share_worst']:.2%}",
            *(format_number(row["logit_error_nats_worst"]), format_number(row["total_variation_mean"])),
            *(format_number(row["mean_divergence"]), f"{row['token_agreement']:.1%}"),
            format_number(row["largest_margin"]),
        )
        for row in rows
    ]
    names = (
        *("base", "transform", "kept", "type", "discarded share", "logit error, worst head", "total variation, mean"),
        *("mean divergence, nats", "best token kept", "largest margin, logits"),
    )
    return (
        "## Head size 128: truncated first\n\n"
        "Against the unfitted base in the same type, on text that the calibration did not see. The discarded share is\n"
        "the part of the logits' variance that the dropped dims carried, in the worst head.\n\n"
        "- **bloom-mini**: the demo's trained base, 2 heads of 128 dims.\n"
        "- **trained here**: 16 heads of 128 dims, as Bloom-1b7 has, four layers, trained for\n"
        f"  {training['seconds']:g} s on the source text of Python's standard library, byte by byte "
        f"({training['held_out_nats_per_byte']:.2f} nats a byte\n  on held-out files).\n"
        "- **random weights**: 8 heads of 128 dims, two layers, 2,048 words, never trained. Random heads use all\n"
        "  directions alike: the worst case. Their best tokens follow from the embedding alone, so the last three\n"
        "  columns say nothing there.\n\n"
        "The conversion refuses a loss above 0.35 nats in the worst head.\n\n" + markdown_table(names, table)
    )


def draw_pictures(figures: Mapping[str, Any]) -> dict[str, Picture]:
    """File name -> picture, for the page about Bloom."""
    fit = fit_alibi(alibi_slopes(HEADS), PAIRS, LENGTH)
    distances = np.arange(LENGTH)
    waves, lines = fit.evaluate(distances.astype(float)), {}
    for head in SHOWN_HEADS:
        line = -fit.slopes[head - 1] * distances
        gap = (waves[head - 1] - line)[line > -FLOOR_NATS]
        lines[str(head)] = (line, waves[head - 1] - (gap.max() + gap.min()) / 2)
    profile = figures["profile"]
    weights = profile["weights"]
    return {
        "alibi_line.png": plot_alibi_line(distances, lines, floor=-FLOOR_NATS, error_nats=fit.error_nats),
        "attention_change.png": plot_attention_change(
            range(len(weights["exact"])), weights, variations=profile["total_variation"]
        ),
    }


def main(folder: Path = HOWTO) -> None:
    """Write pages and pictures."""
    kernel, line, models = (
        json.loads((folder / FIGURES / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES
    )
    (folder / "real_kernel.md").write_text(write_kernel_page(kernel), encoding="utf-8")
    (folder / "fit_figures.md").write_text(write_fit_page(line, models), encoding="utf-8")
    for name, picture in draw_pictures(models).items():
        (folder / FIGURES / name).write_bytes(picture.png)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
