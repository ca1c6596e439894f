"""The pages that show measured figures of kernels and fits, and their pictures, written from committed figures.

`python -m porting_kit.display.fit_pages` reads `xqa.json` and `alibi_fit.json` in `notebooks/howto/figures/` (what
`python -m tests.benchmarks.xqa --json` and `python -m tests.benchmarks.alibi_fit --json` print) and writes the pages
`real_kernel.md` and `fit_figures.md` and the pictures of `making_bloom_work.md`. The pages hold nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from porting_kit.display.fit_plots import plot_alibi_line, plot_attention_change
from porting_kit.display.plots import Picture
from porting_kit.kernel_fit.alibi_line import FLOOR_NATS, alibi_slopes, fit_alibi

HOWTO = Path("notebooks/howto")
FIGURES = "figures"
HEADS, PAIRS, LENGTH = 32, 8, 2048
"""Bloom-7b1's heads, and the pairs that 112 of 128 kept dims leave."""
SHOWN_HEADS = (1, 8, 16, 32)

KERNEL_HEAD = """# The real kernel, measured

What NVIDIA's own kernel computes for a Medusa tree, and how long it takes.

Build: {build},
torch {torch}; measured on {date} by `python -m tests.benchmarks.xqa`. It is TensorRT-LLM's XQA kernel with several
query tokens as flashinfer-python ships it, compiled from source on that machine; keys and values lie in blocks of 64
tokens in shuffled order. Not covered: TensorRT-LLM's own dispatch before the kernel, which may refuse a shape that the
kernel could compute, and the compiled kernels of older releases.

To run a port of your own through it: `porting-kit align PORT.yaml -p kernel=xqa` on a machine with a GPU of compute
capability 9, 10 or 12 and the extra `gpu`. Every tree step of every layer then goes through the kernel; everything else
stays in the emulator. With the bundled definitions, name the release a fit is for as well:
`-p trtllm.release=0.11.0.dev2024062500 -p fit=auto`.
"""

FIT_HEAD = """# How close the ALiBi fit is

How well rotary waves stand for ALiBi, at which head size, in which type, and where they do not.

Measured by `python -m tests.benchmarks.alibi_fit --source TREE` with the tree of 0.11.0.dev2024062500. What follows
from the figures is said in [Making Bloom work](making_bloom_work.md).
"""


def write_kernel_page(figures: Mapping[str, Any]) -> str:
    """The page of the real kernel as Markdown."""
    build = figures["build"]
    text = (
        f"flashinfer-python {build['version']} (commit {build['commit'][:12]}) on one {build['device']}, CUDA "
        f"{build['cuda']}"
    )
    alibi, ports, times = figures["alibi"], figures["ports"], figures["time"]
    far, near = ([row for row in figures["geometry"] if (row["past"] > 1000) == is_far] for is_far in (True, False))
    shortest = {_geometry(row): row for row in near}
    geometry = [
        (
            *_geometry(row),
            _number(shortest[_geometry(row)]["max_error"]),
            _number(row["max_error"]),
            _number(row["relative_error"]),
            _number(row["causal_instead_of_tree"]),
        )
        for row in far
    ]
    pasts = (near[0]["past"], far[0]["past"])
    sections = [
        KERNEL_HEAD.format(build=text, torch=figures["torch"], date=figures["date"]).rstrip(),
        "## The tree, at every geometry\n\n"
        "Two requests, the second with half the past; 4 key/value heads. Errors of the attention output against\n"
        "float32 attention on the same tensors; relative is the norm of the error over the norm of the output.\n"
        f"Rounding the float32 result once is {_span(_of(far, 'float16'))} in float16 and "
        f"{_span(_of(far, 'bfloat16'))} in bfloat16. The last\n"
        "column is what a causal mask in place of the tree would give: the mask is read.\n\n"
        + _table(
            (
                *("head size", "group", "nodes", "type", f"largest error, past {pasts[0]}"),
                *(f"largest error, past {pasts[1]:,}", "relative", "causal mask"),
            ),
            geometry,
        )
        + "\n\nGroups of three and seven are as right as powers of two: from 0.11 on, nothing has to be padded.",
        "## ALiBi, folded and dropped\n\n"
        "32 heads, 64 tree nodes at the end of 2,048 tokens, against exact ALiBi in float64. *Dropped* is what the\n"
        "kernel computes when it gets queries and keys as an ALiBi model has them: as wrong as an output of zeros.\n\n"
        + _table(
            (
                "content dims",
                "pairs",
                "logit spread",
                "type",
                "relative error",
                "worst head",
                "kernel alone",
                "dropped",
            ),
            [
                (
                    *(row["content_dims"], row["pairs"], f"{row['logit_std']:g}", row["dtype"]),
                    *(_number(row["relative_error"]), _number(row["relative_error_worst_head"])),
                    *(_number(row["kernel_alone"]), _number(row["dropped_relative_error"])),
                )
                for row in alibi
            ],
        ),
        "## Whole ports\n\n"
        "`kernel: xqa`, float16: Medusa with a tree, every token judged by the base. The first two and the fitted\n"
        "ones pass; the ALiBi models as they are fail, and the cause is named. Heads and head sizes are those of the\n"
        "real models; weights are random, except bloom-mini's, which was\n"
        "fitted with 112 kept dims here (`fit: auto` now keeps 116 for texts this short).\n\n"
        + _table(
            ("port", "verdict", "tree error", "tokens per step", "in words"),
            [
                (
                    row["port"],
                    row["verdict"],
                    _number(row["tree_error"]),
                    f"{row['tokens_per_step']:.2f}",
                    row["summary"].split(";")[0],
                )
                for row in ports
            ],
        ),
        "## Time\n\n"
        "One call at batch 1 with 64 nodes in float16; median over CUDA graphs that walk through more cache than\n"
        "the card's L2 holds. Bytes are those of keys, values, queries and output; a plain copy on the same card moves "
        f"{times[0]['copy_bytes_per_second'] / 1e12:.2f} TB/s.\n"
        "The kernel is bound by latency at these sizes, not by memory: twice the past costs far less than twice.\n\n"
        + _table(
            (
                *("heads", "head size", "past", "us", "MB moved", "GB/s", "share of the copy rate"),
                "PyTorch's attention, us",
            ),
            [
                (
                    *(f"{row['query_heads']} / {row['kv_heads']}", row["head_size"], row["past"]),
                    *(_number(row["microseconds"]), f"{row['bytes'] / 1e6:.1f}"),
                    *(f"{row['bytes_per_second'] / 1e9:.0f}", f"{row['share_of_copy_rate']:.0%}"),
                    _number(row["torch_microseconds"]),
                )
                for row in times
            ],
        ),
    ]
    return "\n\n".join(sections) + "\n"


def write_fit_page(figures: Mapping[str, Any]) -> str:
    """The page of the fit's figures as Markdown."""
    attention, families, models = figures["attention"], figures["families"], figures["model"]
    sections = [
        FIT_HEAD.rstrip(),
        "## The attention logit and the attention distribution\n\n"
        "2,048 tokens, random content whose logits have the spread given (3 is three times sharper than a random\n"
        "model's). *Logit error*: largest error of the bias where it is above -20 nats. *Total variation*: how much\n"
        "of the attention moves to other keys, between 0 and 1; *dropped* is the same for a kernel that leaves ALiBi\n"
        "out. The bound on the logit error is 0.025 in float32; half precision adds the rounding of the waves.\n\n"
        + _table(
            (
                *("shape", "heads", "pairs", "logit spread", "type", "logit error", "total variation, mean", "worst"),
                "dropped, mean",
            ),
            [
                (
                    *(row["shape"], row["heads"], row["pairs"], f"{row['logit_std']:g}", row["dtype"]),
                    *(_number(row["logit_error_nats"]), _number(row["total_variation_mean"])),
                    *(_number(row["total_variation_worst"]), _number(row["dropped_total_variation_mean"])),
                )
                for row in attention
            ],
        ),
        "## Whole models against Hugging Face\n\n"
        "Random models, prompts up to the fitted length, greedy tokens after each. *Unfitted* is the same model in\n"
        "the same type with exact ALiBi: what half precision costs alone. Falcon's 2 % are not the fit's: Hugging\n"
        "Face rounds its ALiBi to bfloat16.\n\n"
        + _table(
            (
                *("family", "head size", "tokens", "type", "logit error, fitted", "unfitted", "greedy tokens, fitted"),
                "unfitted",
            ),
            [
                (
                    *(row["family"], row["head_size"], f"{row['length_tokens']:,}", row["dtype"]),
                    *(_number(row["fitted_relative_logit_error"]), _number(row["unfitted_relative_logit_error"])),
                    *(f"{row['fitted_greedy_agreement']:.0%}", f"{row['unfitted_greedy_agreement']:.0%}"),
                )
                for row in families
            ],
        ),
        "## Head size 128: truncated first\n\n"
        "bloom-mini, trained, on text of its own writing that the calibration did not see. The discarded share is the\n"
        "part of the logits' variance that the dropped dims carried, in the worst head.\n\n"
        + _table(
            (
                *("kept", "pairs", "type", "discarded share", "logit error, worst head", "total variation, mean"),
                *("mean divergence, nats", "best token kept", "largest margin, logits"),
            ),
            [
                (
                    *(row["kept_dims"], row["pairs"], row["dtype"], f"{row['discarded_share_worst']:.2%}"),
                    *(_number(row["logit_error_nats_worst"]), _number(row["total_variation_mean"])),
                    *(_number(row["mean_divergence"]), f"{row['token_agreement']:.1%}"),
                    _number(row["largest_margin"]),
                )
                for row in models
            ],
        ),
    ]
    return "\n\n".join(sections) + "\n"


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


def _geometry(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["head_size"], row["group"], row["nodes"], row["dtype"]


def _of(rows: Iterable[Mapping[str, Any]], dtype: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["dtype"] == dtype]


def _span(rows: Iterable[Mapping[str, Any]]) -> str:
    found = sorted(row["rounding_only"] for row in rows)
    return f"{_number(found[0])} to {_number(found[-1])}"


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(folder: Path = HOWTO) -> None:
    """Write pages and pictures."""
    kernel, fit = (
        json.loads((folder / FIGURES / name).read_text(encoding="utf-8")) for name in ("xqa.json", "alibi_fit.json")
    )
    (folder / "real_kernel.md").write_text(write_kernel_page(kernel), encoding="utf-8")
    (folder / "fit_figures.md").write_text(write_fit_page(fit), encoding="utf-8")
    for name, picture in draw_pictures(fit).items():
        (folder / FIGURES / name).write_bytes(picture.png)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
