"""Measure how well a kernel fit stands for ALiBi: the line itself, and a trained model before and after.

Run `python -m tests.benchmarks.alibi_fit [--quick] [--json] [--base FOLDER]`.

- line: error of the attention logit where keys matter, how low far keys stay, rounding noise of float16, by head count,
  pairs and length. Heads of 64, 80 and 96 dims inside 128 leave 32, 24 and 16 pairs; 112 kept of 128 leave 8.
- model: a trained ALiBi base of head size 128, truncated and folded: loss of the truncation, and the divergence,
  token agreement and margins of its next-token distributions against the unfitted base on text of its own writing that
  the calibration did not see.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.kernel_fit.activations import measure_activations, sample_prompts
from porting_kit.kernel_fit.alibi_line import alibi_slopes, fit_alibi
from porting_kit.kernel_fit.fit import apply_fit
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.patching.medusa_module import build_medusa_module
from porting_kit.releases.kernels import kernel_profile
from porting_kit.releases.shape import AttentionShape
from porting_kit.source_tree import open_source_tree

BASE = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini" / "base"
RELEASE = "0.11.0.dev2024062500"
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
        started = time.perf_counter()
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
                "seconds": time.perf_counter() - started,
            }
        )
    return rows


def measure_model(base: Path, kept: tuple[int, ...], dtypes: tuple[str, ...], length: int) -> list[dict[str, Any]]:
    """One row for each number of kept dims and each type."""
    tree, rows = open_source_tree("bundled"), []
    for dtype in dtypes:
        config, tensors = checkpoint_tensors(base, dtype=dtype)
        original = open_emulator(tree).build_model(config, tensors)
        written = sample_prompts(original, [[token] for token in range(1, 65)], sequences=64, seed=0)
        moments = measure_activations(original, written)
        unseen = sample_prompts(original, [[token] for token in range(100, 116)], sequences=16, seed=1)
        shape = AttentionShape(
            config["head_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            dtype,
            position_kind="alibi",
            max_seq_len=length,
        )
        for keep in kept:
            names = [f"truncate_heads:{keep}", "fold_alibi"]
            plan = plan_fit(shape, kernel_profile(f"release:{RELEASE}"), names, config=config)
            fitted = apply_fit(plan, config, tensors, activations=moments)
            module = build_medusa_module(tree, config["architecture"], fit=plan)
            model = open_emulator(tree).build_model(
                fitted.config, fitted.tensors, module_source=module.source, class_name=module.base_class_name
            )
            loss, line = (note.figures for note in fitted.notes)
            rows.append(
                {
                    "dtype": dtype,
                    "kept_dims": keep,
                    "pairs": line["pairs"],
                    "discarded_share_worst": loss["discarded_share_worst"],
                    "logit_error_nats_mean": loss["logit_error_nats_mean"],
                    "logit_error_nats_worst": loss["logit_error_nats_worst"],
                    "line_error_nats": line["logit_error_nats"],
                    **compare_models(original, model, unseen),
                }
            )
    return rows


@torch.inference_mode()
def compare_models(original: Any, fitted: Any, texts: list[list[int]]) -> dict[str, float]:
    """Divergence in nats, agreement of the top token, and margins in logits where it differs."""
    divergences, agreements, margins = [], [], []
    for text in texts:
        theirs, ours = (
            model.prefill([torch.tensor(text)], model.new_cache(1, len(text)), all_logits=True).logits[0].double()
            for model in (original, fitted)
        )
        chosen = ours.argmax(-1)
        divergences.append(
            torch.nn.functional.kl_div(
                ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
        )
        agreements.append(chosen == theirs.argmax(-1))
        margins.append(theirs.max(-1).values - theirs.gather(-1, chosen[:, None])[:, 0])
    return {
        "positions": sum(map(len, texts)),
        "mean_divergence": torch.cat(divergences).mean().item(),
        "largest_divergence": torch.cat(divergences).max().item(),
        "token_agreement": torch.cat(agreements).double().mean().item(),
        "largest_margin": torch.cat(margins).max().item(),
    }


def format_rows(rows: list[dict[str, Any]]) -> str:
    """A table with one line a row."""
    lines = ["  ".join(f"{name:>22}" for name in rows[0])]
    lines += ["  ".join(f"{v:>22.5g}" if isinstance(v, float) else f"{v:>22}" for v in row.values()) for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--base", type=Path, default=BASE, help="a trained ALiBi base of head size 128")
    options = parser.parse_args()
    lines = measure_lines(QUICK if options.quick else FULL)
    kept, dtypes = ((112,), ("float16",)) if options.quick else ((116, 112, 96), ("float16", "bfloat16", "float32"))
    model = measure_model(options.base, kept, dtypes, 1024)
    if options.json:
        print(json.dumps({"line": lines, "model": model}, indent=2))
    else:
        print(format_rows(lines), format_rows(model), sep="\n\n")


if __name__ == "__main__":
    main()
