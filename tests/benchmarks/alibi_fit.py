"""Measure how well a kernel fit stands for ALiBi: the line itself, and a trained model before and after.

Run `python -m tests.benchmarks.alibi_fit [--quick] [--json] [--base FOLDER]`.

- line: error of the attention logit where keys matter, how low far keys stay, rounding noise of float16, by head count,
  pairs and length. Heads of 64, 80 and 96 dims inside 128 leave 32, 24 and 16 pairs; 112 kept of 128 leave 8.
- attention: one layer's attention over 2,048 tokens with random content, logits of standard deviation 1 and 3, queries
  and keys in float32, float16 and bfloat16: error of the logit where the bias is above -20, and the total variation
  between the exact and the fitted distribution. The content is rounded on both sides, so what is left is the fit.
- families: random models against Hugging Face, with prompts up to the fitted length: logits, greedy tokens, and the
  same without the fit, which is what half precision costs alone. Bloom runs on the bundled definitions; MPT and
  Falcon-RW need a TensorRT-LLM tree (`--source TREE`).
- model: a trained ALiBi base of head size 128, truncated and folded: loss of the truncation, and the divergence,
  token agreement and margins of its next-token distributions against the unfitted base on text of its own writing that
  the calibration did not see.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.kernel_fit.activations import measure_activations, sample_prompts
from porting_kit.kernel_fit.alibi import model_slopes, wave_biases
from porting_kit.kernel_fit.alibi_line import alibi_slopes, fit_alibi, frequencies
from porting_kit.kernel_fit.fit import CONFIG_KEY, apply_fit
from porting_kit.kernel_fit.plan import plan_fit
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.patching.medusa_module import build_medusa_module
from porting_kit.releases.kernels import kernel_profile
from porting_kit.releases.shape import AttentionShape
from porting_kit.source_tree import open_source_tree
from tests.emulator.toy_models import ToySize
from tests.kernel_fit.fitted_models import fit_toy, random_tokens

BASE = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini" / "base"
RELEASE = "0.11.0.dev2024062500"
NEAR_NATS = 20.0
LENGTH = 2048
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
DTYPES = ("float32", "float16", "bfloat16")
# family of the toy models, heads, head size, whether it needs an upstream tree
FAMILIES = (
    *(("bloom", 4, 64, False), ("bloom", 3, 80, False), ("bloom", 3, 96, False)),
    *(("mpt", 4, 64, True), ("falcon-rw", 4, 64, True)),
)
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


def measure_attention(
    name: str, heads: int, content: int, factor: float, sharpness: float, dtype: str, queries: int = 48
) -> dict[str, Any]:
    """One row: fitted against exact attention distributions of random content."""
    size = 128
    slopes = alibi_slopes(heads) * factor
    fit = fit_alibi(slopes, min((size - content) // 2, 32), LENGTH, dtype)
    kind = getattr(torch, dtype)
    query_wave, key_wave = wave_biases(fit, size, heads, dtype)
    generator = torch.Generator().manual_seed(heads + content)
    rows = torch.linspace(1, LENGTH - 1, queries).round().long()
    query = (torch.randn(heads, queries, content, generator=generator) * sharpness).to(kind).double()
    keys = torch.randn(heads, LENGTH, content, generator=generator).to(kind).double()
    logits = query @ keys.transpose(1, 2) / math.sqrt(content)
    distance = rows[:, None] - torch.arange(LENGTH)
    line = -torch.from_numpy(slopes)[:, None, None] * distance
    waves_q = rotate_waves(query_wave, rows, fit).transpose(0, 1).to(kind).double()
    waves_k = rotate_waves(key_wave, torch.arange(LENGTH), fit).transpose(0, 1).to(kind).double()
    fitted_line = waves_q @ waves_k.transpose(1, 2) / math.sqrt(size)
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
        "pairs": fit.pairs,
        "logit_std": sharpness,
        "dtype": dtype,
        "logit_error_nats": float((gap - middle[..., None]).abs().nan_to_num(0).max()),
        "total_variation_mean": float(variation.mean()),
        "total_variation_worst": float(variation.max()),
        "dropped_total_variation_mean": float(without.mean()),
    }


def measure_families(length: int, source: str | None) -> list[dict[str, Any]]:
    """One row for each random model and type: logits and greedy tokens against Hugging Face in float32."""
    rows = []
    for family, heads, head_size, needs_tree in FAMILIES:
        if needs_tree and source is None:
            continue
        size = ToySize(hidden_size=heads * head_size, heads=heads, kv_heads=heads, positions=length)
        tree = source if needs_tree else "bundled"
        for dtype in DTYPES:
            model = fit_toy(family, size, source=tree, dtype=dtype, max_seq_len=length)
            plain = open_emulator(model.tree).build_model(model.config, model.tensors)
            figures = {
                name: compare_with_reference(model.reference, emulated, length)
                for name, emulated in (("fitted", model.emulate()), ("unfitted", plain))
            }
            rows.append(
                {
                    "family": family,
                    "head_size": head_size,
                    "length_tokens": length,
                    "dtype": dtype,
                    "line_error_nats": model.fitted.notes[-1].figures["logit_error_nats"],
                    **{f"{name}_{key}": value for name, found in figures.items() for key, value in found.items()},
                }
            )
    return rows


@torch.inference_mode()
def compare_with_reference(reference: Any, emulated: Any, length: int, new_tokens: int = 48) -> dict[str, Any]:
    """Largest logit error over the largest logit, and greedy tokens that agree, for short to longest prompts."""
    worst, same, total = 0.0, 0, 0
    for place, size in enumerate((12, length // 3, length - new_tokens - 1)):
        tokens = random_tokens(size, seed=place)
        theirs = reference.generate(tokens[None], max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)[0]
        expected = reference(theirs[None]).logits[0]
        cache = emulated.new_cache(1, len(theirs))
        found = emulated.prefill([theirs], cache, all_logits=True).logits[0][:, : expected.shape[1]].float()
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        ours = generate_greedy(emulated, [tokens.tolist()], new_tokens, ()).tokens[0]
        same += sum(a == b for a, b in zip(ours, theirs[size:].tolist(), strict=False))
        total += new_tokens
    return {"relative_logit_error": worst, "greedy_agreement": same / total}


def measure_model(base: Path, kept: tuple[int, ...], dtypes: tuple[str, ...], length: int) -> list[dict[str, Any]]:
    """One row for each number of kept dims and each type."""
    rows = []
    for dtype in dtypes:
        for keep in kept:
            original, fitted, unseen = fit_trained(base, dtype, keep, length_tokens=length)
            loss, line = (note["figures"] for note in fitted.config[CONFIG_KEY]["notes"])
            rows.append(
                {
                    "dtype": dtype,
                    "kept_dims": keep,
                    "pairs": line["pairs"],
                    "discarded_share_worst": loss["discarded_share_worst"],
                    "logit_error_nats_mean": loss["logit_error_nats_mean"],
                    "logit_error_nats_worst": loss["logit_error_nats_worst"],
                    "line_error_nats": line["logit_error_nats"],
                    **compare_models(original, fitted, unseen),
                    **compare_attention(original, fitted, unseen),
                }
            )
    return rows


def fit_trained(
    base: Path, dtype: str, keep: int, *, length_tokens: int, unseen_tokens: int = 96
) -> tuple[Any, Any, list[list[int]]]:
    """(unfitted model, fitted model, texts of the base's own writing that the calibration did not see)."""
    tree = open_source_tree("bundled")
    config, tensors = checkpoint_tensors(base, dtype=dtype)
    original = open_emulator(tree).build_model(config, tensors)
    moments = measure_once(base, dtype, original)
    unseen = sample_prompts(
        original, [[token] for token in range(100, 116)], sequences=16, length_tokens=unseen_tokens, seed=1
    )
    shape = AttentionShape(
        config["head_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        dtype,
        position_kind="alibi",
        max_seq_len=length_tokens,
    )
    names = [f"truncate_heads:{keep}", "fold_alibi"]
    plan = plan_fit(shape, kernel_profile(f"release:{RELEASE}"), names, config=config)
    fitted = apply_fit(plan, config, tensors, activations=moments)
    module = build_medusa_module(tree, config["architecture"], fit=plan)
    model = open_emulator(tree).build_model(
        fitted.config, fitted.tensors, module_source=module.source, class_name=module.base_class_name
    )
    return original, model, unseen


MOMENTS: dict[tuple[Path, str], Any] = {}


def measure_once(base: Path, dtype: str, original: Any) -> Any:
    """The base's activations on text that it writes itself; the same for every number of kept dims."""
    if (base, dtype) not in MOMENTS:
        written = sample_prompts(original, [[token] for token in range(1, 65)], sequences=64, seed=0)
        MOMENTS[base, dtype] = measure_activations(original, written)
    return MOMENTS[base, dtype]


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


def compare_attention(original: Any, fitted: Any, texts: list[list[int]]) -> dict[str, float]:
    """Total variation between the attention distributions of all layers, heads and queries."""
    found = torch.cat(
        [
            0.5 * (a - b).abs().sum(-1).flatten()
            for text in texts
            for a, b in zip(attention_weights(original, text), attention_weights(fitted, text), strict=True)
        ]
    )
    return {"total_variation_mean": float(found.mean()), "total_variation_worst": float(found.max())}


@torch.inference_mode()
def attention_weights(model: Any, tokens: list[int], *, keep_bias: bool = True) -> list[torch.Tensor]:
    """Each layer's attention distributions on a text, float64 [H, S, S], from what its projections put out.

    Without the bias they are what a kernel computes that never receives ALiBi's slopes.
    """
    config, S = model.config, len(tokens)
    H, K, D = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_size"))
    position = torch.arange(S)
    distance = position[:, None] - position
    weights = []
    with model.record("*attention.qkv") as recorded:
        model.prefill([torch.tensor(tokens)], model.new_cache(1, S))
    for outputs in recorded.values():
        heads = torch.cat(list(outputs)).double().reshape(S, H + 2 * K, D).transpose(0, 1)
        query, key = heads[:H], heads[H : H + K].repeat_interleave(H // K, 0)
        bias = torch.zeros(H, S, S, dtype=torch.float64)
        if not keep_bias:
            pass
        elif config["position_embedding_type"].startswith("alibi"):
            bias = -torch.from_numpy(model_slopes(config))[:, None, None] * distance
        else:
            pairs = config[CONFIG_KEY]["notes"][-1]["figures"]["pairs"]
            angle = position[:, None] * torch.from_numpy(frequencies(float(config["rotary_base"]), pairs))
            query, key = (rotate_front(part, angle) for part in (query, key))
        logits = query @ key.transpose(1, 2) / math.sqrt(D) + bias
        weights.append(logits.masked_fill(distance < 0, -math.inf).softmax(-1))
    return weights


@torch.inference_mode()
def measure_profile(base: Path, kept: int, length: int = 192) -> dict[str, Any]:
    """Attention by distance to the key on a trained base, mean over layers, heads and the second half's queries.

    Exact, without the bias, and fitted.
    """
    original, fitted, texts = fit_trained(base, "float32", kept, length_tokens=1024, unseen_tokens=length)
    plain = attention_weights(original, texts[0], keep_bias=False)
    found = {
        "exact": attention_weights(original, texts[0]),
        "dropped": plain,
        "fitted": attention_weights(fitted, texts[0]),
    }
    profile: dict[str, list[float]] = {}
    for name, layers in found.items():
        rows = torch.cat(layers).mean(0)
        by_distance = [
            rows.diagonal(-distance)[max(0, length // 2 - distance) :].mean() for distance in range(length // 2)
        ]
        profile[name] = [float(value) for value in by_distance]
    variations = {
        name: float(
            torch.stack(
                [0.5 * (a - b).abs().sum(-1).mean() for a, b in zip(found[name], found["exact"], strict=True)]
            ).mean()
        )
        for name in ("dropped", "fitted")
    }
    return {"kept_dims": kept, "weights": profile, "total_variation": variations}


def rotate_front(heads: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2P dims of [H, S, D] by angles [S, P], dim t with t + P."""
    pairs = angle.shape[1]
    first, second, rest = heads.split((pairs, pairs, heads.shape[-1] - 2 * pairs), -1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest)
    return torch.cat(turned, -1)


def rotate_waves(wave: torch.Tensor, positions: torch.Tensor, fit: Any) -> torch.Tensor:
    """Constant wave dims [H, 2P] as the kernel rotates them at each position [S], float64 [S, H, 2P]."""
    angle = positions[:, None].double() * torch.from_numpy(frequencies(fit.base, fit.pairs))
    spread = wave.double()[:, None].expand(-1, len(positions), -1)
    return rotate_front(spread, angle).transpose(0, 1)


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
    parser.add_argument("--source", help="a TensorRT-LLM tree: adds MPT and Falcon-RW")
    options = parser.parse_args()
    lines = measure_lines(QUICK if options.quick else FULL)
    kept, dtypes = ((112,), ("float16",)) if options.quick else ((116, 112, 96), ("float16", "bfloat16", "float32"))
    shapes = list(SHAPES.items())[:1] if options.quick else SHAPES.items()
    document = {
        "line": lines,
        "attention": [
            measure_attention(name, *shape, sharpness, dtype)
            for name, shape in shapes
            for sharpness in (1.0, 3.0)
            for dtype in (dtypes if options.quick else DTYPES)
        ],
        "families": [] if options.quick else measure_families(1024, options.source),
        "model": measure_model(options.base, kept, dtypes, 1024),
        "profile": measure_profile(options.base, kept[0]),
    }
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print(*(format_rows(rows) for rows in document.values() if rows and isinstance(rows, list)), sep="\n\n")


if __name__ == "__main__":
    main()
