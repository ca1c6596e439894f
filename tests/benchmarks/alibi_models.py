"""Measure what a kernel fit costs whole ALiBi models: logits, tokens and attention, before and after.

Run `python -m tests.benchmarks.alibi_models [--quick] [--json] [--source TREE] [--device cuda] [--train SECONDS]`.

- families: random models with the real head count and head size of Bloom, MPT, Baichuan-13B and Falcon-RW, against
  Hugging Face in float32, with prompts up to the fitted length: logits, greedy tokens, attention, and the same without
  the fit, which is what half precision costs alone. At head size 128 queries and keys are truncated first, to each of
  several numbers of dims; with 99 words in one layer these heads use fewer, so what shows is the line, not the
  truncation. Bloom runs on the bundled definitions; the others need a TensorRT-LLM tree (`--source TREE`). Falcon's
  reference keeps its ALiBi in float32.
- trained: trained bases of head size 128, truncated and fitted: loss of the truncation, and the divergence, token
  agreement and margins of the next-token distributions against the unfitted base on text that the calibration did not
  see. The demo's Bloom (2 heads) always; with `--train SECONDS` also a Bloom with Bloom-1b7's heads (16 of 128 dims)
  that is trained here for so long on the source text of Python's standard library, byte by byte.
- random: the same for random weights with 8 heads of 128 dims and 2,048 words, which use all directions of a head
  alike: the worst case.
- profile: attention by distance on the demo's Bloom, exact, without the bias, and fitted; for the picture.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from porting_kit.conversion.convert import checkpoint_tensors
from porting_kit.emulator import open_emulator
from porting_kit.errors import ConversionError
from porting_kit.kernel_fit.activations import measure_activations, sample_prompts
from porting_kit.kernel_fit.fit import CONFIG_KEY, apply_fit
from porting_kit.kernel_fit.fit_step import FitStep
from porting_kit.kernel_fit.plan import FitPlan, plan_fit
from porting_kit.medusa.decoding import generate_greedy
from porting_kit.patching.medusa_module import build_medusa_module
from porting_kit.releases.kernels import kernel_profile
from porting_kit.source_tree import SourceTree, open_source_tree
from tests.benchmarks.alibi_fit import format_rows
from tests.emulator.toy_models import ToySize, make_reference
from tests.kernel_fit.attention_change import attention_weights, compare_attention, read_attention
from tests.kernel_fit.figures import write_figures
from tests.kernel_fit.fitted_models import random_tokens, shape_of, sharpen
from tests.kernel_fit.trained_bloom import read_library_texts, train_bloom

BASE = Path(__file__).parents[2] / "notebooks" / "ports" / "bloom-mini" / "base"
RELEASE = "0.11.0.dev2024062500"
DTYPES = ("float32", "float16", "bfloat16")
NEW_TOKENS = 32
ATTENTION_TOKENS = 512
PROFILE_KEPT = 116
# transform -> types it is for, and kept dims at head size 128: of random models, of trained ones
TRANSFORMS = {
    "fold_alibi": (DTYPES, (112, 96), (116, 112, 96)),
    "write_positions": (("float32", "bfloat16"), (124,), (124,)),
}
RANDOM_VOCAB = 2048
PARTS = ("families", "trained", "random", "profile")


@dataclass(frozen=True)
class Case:
    """A random model with a real model's heads.

    Args:
        family: of the toy models; `baichuan` is LLaMA with ALiBi, re-expressed.
        sharpness: factor on the content logits.
    """

    family: str
    heads: int
    head_size: int
    needs_tree: bool = False
    sharpness: float = 1.0


CASES = (
    *(Case("bloom", 16, 64), Case("bloom", 16, 64, sharpness=3.0), Case("bloom", 32, 80), Case("bloom", 16, 96)),
    Case("falcon-rw", 32, 64, True),
    *(Case("bloom", 32, 128), Case("mpt", 32, 128, True), Case("baichuan", 40, 128, True)),
)
QUICK = (Case("bloom", 4, 64),)


@dataclass
class Model:
    """One model in float32, and what is measured against it.

    Args:
        reference: Hugging Face's, None for a base that is compared with itself.
        moments: of queries and keys, for truncations.
    """

    reference: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tree: SourceTree
    device: str
    moments: Any = None

    def build(self, dtype: str) -> Any:
        """The unfitted model in the emulator, exact."""
        config = {**self.config, "dtype": dtype}
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in self.tensors.items()}
        return open_emulator(self.tree, device=self.device).build_model(config, tensors)

    def fit(self, transform: str, keep: int | None, dtype: str, length: int) -> Any:
        """The fitted model in the emulator, exact; a truncation is not refused whatever it loses."""
        config = {**self.config, "dtype": dtype}
        shape = shape_of(config, dtype="float16" if transform == "fold_alibi" else "bfloat16", max_seq_len=length)
        names = [transform] if keep is None else [f"truncate_heads:{keep}", transform]
        plan = plan_fit(shape, kernel_profile(f"release:{RELEASE}"), names, config=config)
        fitted = apply_fit(_without_bound(plan), config, self.tensors, activations=self.moments)
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in fitted.tensors.items()}
        module = build_medusa_module(self.tree, config["architecture"], fit=plan)
        return open_emulator(self.tree, device=self.device).build_model(
            fitted.config, tensors, module_source=module.source, class_name=module.base_class_name
        )


def _without_bound(plan: FitPlan) -> FitPlan:
    steps = [
        FitStep(step.name, {**step.arguments, "bound_nats": math.inf}) if step.name == "truncate_heads" else step
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))


def list_fits(head_size: int, *, trained: bool = False) -> list[tuple[str, int | None, str]]:
    """(transform, kept dims, type): everything that is measured for a head size."""
    return [
        (name, keep, dtype)
        for name, (dtypes, random_kept, trained_kept) in TRANSFORMS.items()
        for keep in ((trained_kept if trained else random_kept) if head_size == 128 else (None,))
        for dtype in dtypes
    ]


def open_case(case: Case, length: int, source: str | None, device: str) -> Model:
    """The random model and its converted tensors."""
    width = case.heads * case.head_size
    size = ToySize(width, 1 if width > 2048 else 2, case.heads, case.heads, 512, positions=length)
    tree = open_source_tree(source if case.needs_tree else "bundled")
    release = tree.release if case.needs_tree else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = save_baichuan(size, folder) if case.family == "baichuan" else make_reference(case.family, size)
        if case.sharpness != 1.0:
            sharpen(reference, size, case.sharpness)
        if case.family != "baichuan":
            reference.save_pretrained(folder)
        if case.family == "falcon-rw":
            forget_rounding()
        config, tensors = checkpoint_tensors(folder, dtype="float32", release=release)
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    model = Model(reference.to(device), config, tensors, tree, device)
    if case.head_size == 128:
        prompts = [random_tokens(256, seed).tolist() for seed in range(100, 112)]
        model.moments = measure_activations(model.build("float32"), prompts)
    return model


def forget_rounding() -> None:
    """Hugging Face rounds Falcon's ALiBi to bfloat16, off by up to a nat at 2,048 tokens: keep it in float32."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as build_exactly
    from transformers.models.falcon import modeling_falcon

    modeling_falcon.build_alibi_tensor = lambda mask, heads, dtype: build_exactly(mask, heads, torch.float32)


def save_baichuan(size: ToySize, folder: Path) -> Any:
    """A random Baichuan-13B with these heads, saved under its own names."""
    from porting_kit.coverage.cases import CASES as COVERED
    from porting_kit.coverage.reference_models import ModelSize, save_reference
    from porting_kit.coverage.reference_models import make_reference as make_covered

    (case,) = (each for each in COVERED if each.text.startswith("baichuan2 13B"))
    # That case halves the heads, which other families group.
    wanted = ModelSize(
        **{name: getattr(size, name) for name in ModelSize.__dataclass_fields__} | {"heads": 2 * size.heads}
    )
    case = replace(case, size=wanted)
    model = make_covered(case)
    save_reference(case, model, folder)
    return model


def measure_case(case: Case, length: int, source: str | None, device: str) -> list[dict[str, Any]]:
    """One row for each fit and type: against Hugging Face in float32."""
    model = open_case(case, length, source, device)
    texts = [random_tokens(min(length, ATTENTION_TOKENS), seed=7).tolist()]
    expected = read_reference(model, length)
    exact = read_attention(model.build("float32"), texts)

    def compare(emulated: Any) -> dict[str, float]:
        change = compare_attention(exact, emulated, texts)["total_variation_mean"]
        return {**compare_with_reference(expected, emulated), "total_variation_mean": change}

    unfitted: dict[str, dict[str, float]] = {}
    rows = []
    for transform, keep, dtype in list_fits(case.head_size):
        if dtype not in unfitted:
            unfitted[dtype] = compare(model.build(dtype))
        try:
            fitted = model.fit(transform, keep, dtype, length)
        except ConversionError:  # the line itself is beyond the bound
            continue
        notes = [note["figures"] for note in fitted.config[CONFIG_KEY]["notes"]]
        found = {"fitted": compare(fitted), "unfitted": unfitted[dtype]}
        rows.append(
            {
                "family": case.family,
                "heads": case.heads,
                "head_size": case.head_size,
                "sharpness": case.sharpness,
                "length_tokens": length,
                "transform": transform,
                "kept_dims": keep,
                "dtype": dtype,
                "line_error_nats": notes[-1]["logit_error_nats"],
                **{f"{name}_{key}": value for name, each in found.items() for key, value in each.items()},
            }
        )
    return rows


@torch.inference_mode()
def read_reference(model: Model, length: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(text, logits, length of the prompt) for short to longest prompts, each with Hugging Face's greedy tokens."""
    read = []
    # A model with an attention mask of its own takes no cache.
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    settings["use_cache"] = model.config["architecture"] != "BaichuanForCausalLM"
    for place, size in enumerate((12, length // 3, length - NEW_TOKENS - 1)):
        tokens = random_tokens(size, seed=place).to(model.device)
        tokens = model.reference.generate(tokens[None], **settings)[0]
        read.append((tokens, model.reference(tokens[None]).logits[0].cpu(), size))
    return read


@torch.inference_mode()
def compare_with_reference(expected: list[tuple[torch.Tensor, torch.Tensor, int]], emulated: Any) -> dict[str, float]:
    """Largest logit error over the largest logit, and greedy tokens that agree, for short to longest prompts."""
    worst, same, total = 0.0, 0, 0
    for tokens, logits, size in expected:
        cache = emulated.new_cache(1, len(tokens))
        found = emulated.prefill([tokens.cpu()], cache, all_logits=True).logits[0][:, : logits.shape[1]].float().cpu()
        worst = max(worst, float((found - logits).abs().max() / logits.abs().max()))
        ours = generate_greedy(emulated, [tokens[:size].tolist()], NEW_TOKENS, ()).tokens[0]
        same += sum(a == b for a, b in zip(ours, tokens[size:].tolist(), strict=False))
        total += NEW_TOKENS
    return {"relative_logit_error": worst, "greedy_agreement": same / total}


def open_trained(base: Path, device: str) -> tuple[Model, list[list[int]]]:
    """A trained base, with moments of its own writing, and writing that the calibration did not see."""
    config, tensors = checkpoint_tensors(base, dtype="float32")
    model = Model(None, config, tensors, open_source_tree("bundled"), device)
    original = model.build("float32")
    written = sample_prompts(original, [[token] for token in range(1, 65)], sequences=64, seed=0)
    model.moments = measure_activations(original, written)
    starts = [[token] for token in range(100, 116)]
    return model, sample_prompts(original, starts, sequences=16, length_tokens=96, seed=1)


def open_random() -> tuple[Model, list[list[int]]]:
    """A random Bloom with heads of 128 dims and more words than that: its heads use all directions alike."""
    size = ToySize(8 * 128, 2, 8, 8, vocab=RANDOM_VOCAB)
    reference = make_reference("bloom", size)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        config, tensors = checkpoint_tensors(Path(folder), dtype="float32")
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    model = Model(None, config, tensors, open_source_tree("bundled"), "cpu")
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(0, RANDOM_VOCAB, (32, 192), generator=generator).tolist()
    model.moments = measure_activations(model.build("float32"), texts[8:])
    return model, texts[:8]


def open_own_training(seconds: float, device: str) -> tuple[Model, list[list[int]], dict[str, Any]]:
    """A Bloom with Bloom-1b7's heads trained here, held-out texts, and how far the training came."""
    trained = train_bloom(seconds, device)
    with tempfile.TemporaryDirectory() as folder:
        trained.model.save_pretrained(folder)
        config, tensors = checkpoint_tensors(Path(folder), dtype="float32")
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    model = Model(None, config, tensors, open_source_tree("bundled"), device)
    calibration, unseen = read_library_texts(24, 192, seed=3), read_library_texts(16, 192, seed=4, held_out=True)
    model.moments = measure_activations(model.build("float32"), calibration)
    account = {"seconds": seconds, "steps": trained.steps, "held_out_nats_per_byte": trained.held_out_loss}
    return model, unseen, account


def measure_trained(
    name: str, model: Model, unseen: list[list[int]], length: int, fits: list[tuple[str, int | None, str]]
) -> list[dict[str, Any]]:
    """One row for each fit and type, against the unfitted base in the same type."""
    rows = []
    originals = {dtype: model.build(dtype) for dtype in dict.fromkeys(dtype for _, _, dtype in fits)}
    exact = {dtype: read_attention(original, unseen) for dtype, original in originals.items()}
    for transform, keep, dtype in fits:
        original, fitted = originals[dtype], model.fit(transform, keep, dtype, length)
        loss = fitted.config[CONFIG_KEY]["notes"][0]["figures"]
        rows.append(
            {
                "base": name,
                "dtype": dtype,
                "transform": transform,
                "kept_dims": keep,
                "discarded_share_worst": loss["discarded_share_worst"],
                "logit_error_nats_worst": loss["logit_error_nats_worst"],
                **compare_models(original, fitted, unseen),
                **compare_attention(exact[dtype], fitted, unseen),
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
        pointwise = torch.nn.functional.kl_div(
            ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
        )
        divergences.append(pointwise.sum(-1))
        agreements.append(chosen == theirs.argmax(-1))
        margins.append(theirs.max(-1).values - theirs.gather(-1, chosen[:, None])[:, 0])
    return {
        "mean_divergence": torch.cat(divergences).mean().item(),
        "token_agreement": torch.cat(agreements).double().mean().item(),
        "largest_margin": torch.cat(margins).max().item(),
    }


@torch.inference_mode()
def measure_profile(model: Model, text: list[int]) -> dict[str, Any]:
    """Attention by distance to the key, mean over layers, heads and the second half's queries.

    Exact, without the bias, and fitted.
    """
    original, length = model.build("float32"), len(text)
    found = {
        "exact": attention_weights(original, text),
        "dropped": attention_weights(original, text, keep_bias=False),
        "fitted": attention_weights(model.fit("fold_alibi", PROFILE_KEPT, "float32", 1024), text),
    }
    profile: dict[str, list[float]] = {}
    for name, layers in found.items():
        rows = torch.cat(layers).mean(0)
        by_distance = [
            rows.diagonal(-distance)[max(0, length // 2 - distance) :].mean() for distance in range(length // 2)
        ]
        profile[name] = [round(float(value), 7) for value in by_distance]
    changes = {
        name: [0.5 * (a - b).abs().sum(-1).mean() for a, b in zip(found[name], found["exact"], strict=True)]
        for name in ("dropped", "fitted")
    }
    variations = {name: float(torch.stack(change).mean()) for name, change in changes.items()}
    return {"kept_dims": PROFILE_KEPT, "weights": profile, "total_variation": variations}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model, one type of the trained one")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--base", type=Path, default=BASE, help="a trained ALiBi base of head size 128")
    parser.add_argument("--source", help="a TensorRT-LLM tree: adds MPT, Baichuan and Falcon-RW")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--length", type=int, default=1024, help="longest text of the random models, in tokens")
    parser.add_argument("--train", type=float, default=0.0, metavar="SECONDS", help="train a second base for so long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--head-sizes", nargs="+", type=int, help="of the random models; all when left out")
    options = parser.parse_args()
    length = 256 if options.quick else options.length
    document: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "families": [], "trained": []}
    if "families" in options.parts:
        for case in QUICK if options.quick else CASES:
            is_wanted = not options.head_sizes or case.head_size in options.head_sizes
            if is_wanted and (options.source or not case.needs_tree):
                document["families"] += measure_case(case, length, options.source, options.device)
    fits = [("fold_alibi", 116, "float16")] if options.quick else list_fits(128, trained=True)
    if {"trained", "profile"} & set(options.parts):
        mini, unseen = open_trained(options.base, options.device)
    if "trained" in options.parts:
        document["trained"] += measure_trained("bloom-mini", mini, unseen, 1024, fits)
    if "random" in options.parts:
        exact = [fit for fit in fits if fit[2] == "float32"] or fits
        document["trained"] += measure_trained("random weights", *open_random(), 1024, exact)
    if "trained" in options.parts and options.train:
        model, texts, document["training"] = open_own_training(options.train, options.device)
        document["trained"] += measure_trained("trained here", model, texts, 1024, fits)
    if "profile" in options.parts:
        (text,) = sample_prompts(mini.build("float32"), [[100]], sequences=1, length_tokens=192, seed=1)
        document["profile"] = measure_profile(mini, text)
    if options.json:
        print(write_figures(document))
    else:
        print(*(format_rows(document[name]) for name in ("families", "trained") if document[name]), sep="\n\n")


if __name__ == "__main__":
    main()
