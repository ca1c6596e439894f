"""The alignment of a port, in order: base healthy, runs, noise, judgement, comparisons, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting_kit.alignment.activations import check_activations
from porting_kit.alignment.comparison import DecodeRun, run_decoding
from porting_kit.alignment.fit import FIT_BOUNDS, ContextOracle, bound_by_rounding, measure_fit
from porting_kit.alignment.gates import (
    GREEDY,
    REPEAT,
    compare_all,
    decide_verdict,
    judge_fit,
    judge_heads,
    judge_logits,
    judge_tokens,
    summarise,
)
from porting_kit.alignment.head_oracle import ReferenceHeads, predict_acceptance
from porting_kit.alignment.inherent import KnownDifference, choose_differences, matched_to_library, measure_inherent
from porting_kit.alignment.noise import LogitsNoise, compare_logits, measure_error, measure_noise, relative_error
from porting_kit.alignment.oracle import JudgedText, judge_texts
from porting_kit.alignment.reference import LogitsSource, Reference, dtype_name
from porting_kit.alignment.remembered import RememberedOracle
from porting_kit.alignment.result import AlignmentResult, ApproximateFit
from porting_kit.alignment.rounding import read_rounded
from porting_kit.medusa.tree import MedusaTree
from porting_kit.outcomes import Coverage

BASE, FITTED_BASE = "the base", "the fitted base"
EMULATED = (Coverage.WEIGHTS, Coverage.MODEL_CODE, Coverage.TREE_AND_ACCEPTANCE)
TOKENS_ONLY = (Coverage.WEIGHTS, Coverage.MODEL_CODE)
"""What tokens from elsewhere cover by themselves: they do not say which engine, on which card, or how many a step."""


@dataclass(frozen=True)
class AlignmentOptions:
    """What to run and how strictly.

    Args:
        new_tokens: tokens each prompt may emit.
        batch_sizes: requests per call of the Medusa runs; None is 1, 2 and all prompts at once.
        near_tie_tolerance: gap in logits; None measures it.
        differences: the family's inherent differences.
        fit_notes: what an approximate kernel fit did; empty for an exact port, whose oracle is the base itself.
        rounded: the base rounded as a quantised port is, to another grid: its distance from the original bounds the
            port's; None for a port that is not quantised, whose bounds are `FIT_BOUNDS`.
        covered: what the verdict covers; None is what an emulated run covers.
    """

    new_tokens: int = 64
    batch_sizes: tuple[int, ...] | None = None
    near_tie_tolerance: float | None = None
    differences: tuple[KnownDifference, ...] = ()
    fit_notes: tuple[str, ...] = ()
    rounded: LogitsSource | None = None
    covered: tuple[Coverage, ...] | None = None


def align_port_outputs(
    reference: Reference,
    model: Any,
    prompts: Sequence[Sequence[int]],
    tree: MedusaTree | None = None,
    *,
    heads: ReferenceHeads | None = None,
    options: AlignmentOptions | None = None,
) -> AlignmentResult:
    """Does the emulated port say what its base says?

    Args:
        reference: the base in float32.
        model: the emulated port (any `medusa.decoding.DecodableModel` whose prefill knows `all_logits`).
        prompts: token ids, best of unequal lengths.
        tree: the Medusa tree; None checks plain greedy decoding only.
        heads: the heads in float32, to check acceptance; None skips that gate.
        options: see `AlignmentOptions`.

    Raises:
        BaseModelError: the base itself is broken in the port's dtype.
        KernelRefusal: the kernel profile refuses the model.
    """
    options = options or AlignmentOptions()
    prompts = [torch.as_tensor(prompt).tolist() for prompt in prompts]
    end_ids = reference.settings.end_ids
    check_activations(reference, prompts, model.dtype)
    runs = _run_everything(model, tree, prompts, end_ids, options)
    main = runs[0]
    texts = [[*prompt, *row] for prompt, row in zip(prompts, main.tokens, strict=True)]
    port = RememberedOracle(ContextOracle(model), texts)
    port_logits = port.logits(texts)
    applying = choose_differences(reference, options.differences, texts, port_logits)
    inherent = measure_inherent(reference, options.differences, texts, applying)
    with matched_to_library(reference, applying):
        base = RememberedOracle(reference, texts)
        oracle = port if options.fit_notes else base
        rounded_logits, rounded_states = read_rounded(reference, texts, model.dtype)
        noise = compare_logits(
            base.logits(texts), rounded_logits, dtype_name(model.dtype), tolerance=options.near_tie_tolerance
        )
        del rounded_logits  # as large as all texts' logits
        judged = _judge_runs(oracle, runs, prompts, noise, end_ids, options.new_tokens)
        context_error = measure_error(port_logits, base, texts)
        tree_error = _tree_error(main, oracle, texts, prompts)
        fit = _measure_fit(base, oracle, texts, noise, options)
        predicted = states = None
        if heads is not None and tree is not None:
            states = port.hidden_states(texts) if fit else None  # an approximate port's heads read its own states
            known = (base.hidden_states(texts), rounded_states)
            predicted = predict_acceptance(reference, heads, tree, prompts, main.tokens, model.dtype, states, *known)
    gates = [
        judge_tokens(judged[main.name], FITTED_BASE if fit else BASE),
        judge_logits(noise, None if fit else context_error, tree_error, chooses_experts=reference.chooses_experts),
        *compare_all(runs, judged),
        *judge_heads(predicted, main.accepted_lengths, is_fitted=fit is not None and states is None),
        *judge_fit(fit),
    ]
    return AlignmentResult(
        verdict=decide_verdict(gates),
        summary=summarise(gates, judged[main.name], fit),
        covered=options.covered or EMULATED[: 3 if tree is not None else 2],
        gates=tuple(gates),
        texts=tuple(judged[main.name]),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        settings=reference.settings,
        noise=noise,
        tokens_per_step=main.tokens_per_step if tree is not None else 1.0,
        accepted_by_depth=_accepted_by_depth(main),
        head_agreement=() if predicted is None else tuple(predicted.agreement),
        predicted_tokens_per_step=None if predicted is None else predicted.tokens_per_step(),
        context_error=context_error,
        tree_error=tree_error,
        inherent=tuple(inherent),
        approximate_fit=fit,
        accepted_lengths=tuple(tuple(lengths) for lengths in main.accepted_lengths) if tree is not None else None,
        logits=None if main.logits is None else tuple(main.logits),
        runs={run.name: {"tokens_per_step": run.tokens_per_step, "seconds": run.seconds} for run in runs},
    )


def align_captured_outputs(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    fitted: LogitsSource | None = None,
    options: AlignmentOptions | None = None,
) -> AlignmentResult:
    """Judge tokens that an engine emitted on another machine.

    Args:
        reference: the base in float32.
        prompts: token ids the engine was given.
        emitted: token ids it emitted per prompt, the prompt and the padding not included.
        dtype: what the engine computes in.
        fitted: judge of a fitted port (`fit.ContextOracle` of the emulated port); None judges with the base.
        options: `new_tokens` is what the engine was asked for.

    Raises:
        BaseModelError: the base itself is broken in the engine's dtype.
    """
    options = options or AlignmentOptions()
    prompts = [torch.as_tensor(prompt).tolist() for prompt in prompts]
    check_activations(reference, prompts, dtype)
    vocab_size = reference.vocab_size
    texts = [
        [*prompt, *(token for token in row if 0 <= token < vocab_size)]
        for prompt, row in zip(prompts, emitted, strict=True)
    ]
    inherent = measure_inherent(reference, options.differences, texts)
    with matched_to_library(reference, options.differences):
        oracle = fitted or reference
        noise = measure_noise(reference, texts, dtype, tolerance=options.near_tie_tolerance)
        judged = judge_texts(
            oracle,
            prompts,
            emitted,
            noise.near_tie_tolerance,
            end_ids=reference.settings.end_ids,
            asked_tokens=options.new_tokens,
        )
        fit = _measure_fit(reference, oracle, texts, noise, options) if fitted is not None else None
    gates = [judge_tokens(judged, FITTED_BASE if fit else BASE), *judge_fit(fit)]
    return AlignmentResult(
        verdict=decide_verdict(gates),
        summary=summarise(gates, judged, fit),
        covered=options.covered or TOKENS_ONLY,
        gates=tuple(gates),
        texts=tuple(judged),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        settings=reference.settings,
        noise=noise,
        inherent=tuple(inherent),
        approximate_fit=fit,
    )


# ---------------------------------------------------------------- steps of the pipeline


def _run_everything(
    model: Any, tree: MedusaTree | None, prompts: list[list[int]], end_ids: Sequence[int], options: AlignmentOptions
) -> list[DecodeRun]:
    """The main run first (smallest batch, logits kept), plain greedy, the other batch sizes, the last of them again.

    The smallest batch is the main one, so that a fault of batching shows in its own gate.
    """
    largest = len(prompts)
    sizes = sorted({min(size, largest) for size in options.batch_sizes or (1, 2, largest)})
    kind = "greedy" if tree is None else "medusa"

    def run(name: str, run_tree: MedusaTree | None, size: int, keep_logits: bool = False) -> DecodeRun:
        return run_decoding(
            model, run_tree, prompts, options.new_tokens, end_ids, size, name=name, keep_logits=keep_logits
        )

    runs = [run(f"{kind} batch {sizes[0]}", tree, sizes[0], keep_logits=True)]
    runs += [run(GREEDY, None, sizes[-1])] if tree is not None else []
    runs += [run(f"{kind} batch {size}", tree, size) for size in sizes[1:]]
    return [*runs, run(REPEAT, tree, sizes[-1])]


def _judge_runs(
    oracle: LogitsSource,
    runs: Sequence[DecodeRun],
    prompts: Sequence[Sequence[int]],
    noise: LogitsNoise,
    end_ids: Sequence[int],
    new_tokens: int,
) -> dict[str, list[JudgedText]]:
    """Judge every run; texts that several runs have in common go through the oracle once."""
    known: dict[tuple[int, tuple[int, ...]], JudgedText] = {}
    judged = {}
    for run in runs:
        rows, origins = run.tokens, run.origins
        fresh = [index for index, row in enumerate(rows) if (index, tuple(row)) not in known]
        texts = judge_texts(
            oracle,
            [prompts[index] for index in fresh],
            [rows[index] for index in fresh],
            noise.near_tie_tolerance,
            end_ids=end_ids,
            asked_tokens=new_tokens,
            origins=[origins[index] for index in fresh],
        )
        known |= {(index, tuple(rows[index])): text for index, text in zip(fresh, texts, strict=True)}
        # A text first seen in another run keeps that run's judgement, with this run's own origins.
        judged[run.name] = [_with_origins(known[index, tuple(row)], origins[index]) for index, row in enumerate(rows)]
    return judged


def _with_origins(text: JudgedText, origins: Any) -> JudgedText:
    return JudgedText(**{**vars(text), "origins": origins})


def _tree_error(
    run: DecodeRun, oracle: LogitsSource, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> float | None:
    """Worst relative error of the logits behind each token of the generation phase."""
    if run.logits is None:
        return None
    errors = []
    for ours, theirs, prompt in zip(run.logits, oracle.logits(texts), prompts, strict=True):
        if len(ours) > 1:
            errors.append(relative_error(ours[1:], theirs[len(prompt) :][: len(ours) - 1]))
    return max(errors, default=None)


def _measure_fit(
    reference: LogitsSource, oracle: LogitsSource, texts: Any, noise: LogitsNoise, options: AlignmentOptions
) -> ApproximateFit | None:
    if not options.fit_notes:
        return None
    bounds, tolerance = FIT_BOUNDS, noise.near_tie_tolerance
    if options.rounded is not None:
        rounded = measure_fit(reference, options.rounded, texts, (), tolerance)
        bounds = bound_by_rounding(rounded, sum(map(len, texts)))
    return measure_fit(reference, oracle, texts, options.fit_notes, tolerance, bounds)


def _accepted_by_depth(run: DecodeRun) -> tuple[float, ...]:
    lengths = torch.tensor([length for row in run.accepted_lengths for length in row])
    deepest = int(lengths.max()) if len(lengths) else 0
    return tuple((lengths > depth).double().mean().item() for depth in range(1, deepest))
