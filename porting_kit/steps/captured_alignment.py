"""Align what an engine said elsewhere: the capture script's file, with every run in it.

The main run is judged by the base, token by token; the other runs (larger batches, the repeat, streaming, an engine of
the base alone) are laid beside it. What such a file shows is the whole chain in one: weights, model code, tree,
kernels and engine, on the card and release it names and for these prompts. It shows none of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.gates import GREEDY, compare_all, decide_verdict, judge_heads, judge_logits, summarise
from porting_kit.alignment.head_oracle import PredictedAcceptance, predict_acceptance
from porting_kit.alignment.inherent import matched_to_library
from porting_kit.alignment.noise import relative_error
from porting_kit.alignment.oracle import JudgedText, judge_texts
from porting_kit.alignment.reference import LogitsSource, resolve_dtype
from porting_kit.alignment.result import AlignmentResult, Gate
from porting_kit.alignment.run import align_captured_outputs
from porting_kit.engine.capture_kit import digest_checkpoint
from porting_kit.engine.captured_runs import MAIN, REPEAT, STREAMED, CapturedRun, CaptureFile, check_capture
from porting_kit.errors import CapturedFileError, KernelRefusal
from porting_kit.medusa.tree import MedusaTree
from porting_kit.outcomes import Coverage

if TYPE_CHECKING:
    from porting_kit.steps.alignment_session import AlignmentSession

BASE_RUN = "base batch 1"
RUNS, ACCEPTANCE = "runs", "acceptance"


@dataclass(frozen=True)
class _Named:
    """A run as `compare_all` looks at it."""

    name: str


def align_capture(session: AlignmentSession, capture: CaptureFile) -> AlignmentResult:
    """Judge every run of a captured file.

    Args:
        session: the opened port.
        capture: from `engine.captured_runs.read_capture_file`.

    Raises:
        CapturedFileError: the file belongs to another port, or its main run failed.
        KernelRefusal: the engine's kernels refused the model.
    """
    port, reference = session.run.port, session.reference
    check_capture(
        capture,
        prompts=session.prompts,
        choices=session.tree.choices(),
        vocab_size=reference.vocab_size,
        new_tokens=port.alignment.new_tokens,
        checkpoint=digest_checkpoint(session.run.folder.checkpoint),
        planned_release=planned_release(session),
    )
    main = _require_main(capture)
    fitted = ContextOracle(session.model) if session.approximate_fit_notes else None
    prompts, emitted = capture.prompts, [list(rows[0]) for rows in main.tokens]
    options = session.options
    dtype = resolve_dtype(port.dtype)
    result = align_captured_outputs(reference, prompts, emitted, dtype, fitted=fitted, options=options)
    named = _name_runs(capture, main)
    with matched_to_library(reference, options.differences):
        judged = {name: _judge(fitted or reference, prompts, tokens, result, session) for name, tokens in named.items()}
        accepted, predicted = _acceptance(capture, emitted, session.tree, session, prompts, dtype)
        logits, error = _compare_logits(capture, fitted or reference, emitted)
    gates = [*result.gates, *compare_all([_Named(name) for name in named], judged)]
    if accepted is not None:
        gates += judge_heads(predicted, accepted, is_fitted=fitted is not None)
    if error is not None:
        gates.append(judge_logits(result.noise, None, error, chooses_experts=reference.chooses_experts))
    gates.append(_runs_gate(capture))
    tokens_per_step = _tokens_per_step(capture, emitted, accepted)
    return replace(
        result,
        verdict=decide_verdict(gates),
        summary=summarise(gates, result.texts, result.approximate_fit),
        covered=_covered(tokens_per_step, error),
        gates=tuple(gates),
        tokens_per_step=tokens_per_step,
        accepted_lengths=None if accepted is None else tuple(tuple(row) for row in accepted),
        head_agreement=() if predicted is None else tuple(predicted.agreement),
        predicted_tokens_per_step=None if predicted is None else predicted.tokens_per_step(),
        tree_error=error,
        logits=logits,
    )


def planned_release(session: AlignmentSession) -> str | None:
    """The release that the run's build was planned for, None when nothing was planned in it."""
    outcome = session.run.folder.outcome("build")
    return None if outcome is None else outcome.figures.get("release")


def _require_main(capture: CaptureFile) -> CapturedRun:
    main = capture.run(MAIN)
    if main is not None and all(main.tokens):
        return main
    known = next((found for found in capture.messages if found.message.fatal), None)
    if known is not None and known.message.name == "no multi-query kernel":
        raise KernelRefusal(
            known.message.cause,
            expected=known.message.name,
            found=known.line,
            where=capture.where,
            next_step=known.message.next_step,
        )
    raise CapturedFileError(
        "the engine's first run failed: there are no tokens to judge",
        expected=f"a run {MAIN!r} with an answer to every prompt",
        found="; ".join(capture.failures) or "no run",
        where=capture.where,
        next_step=known.message.next_step if known else "read the error in the file, mend it, and capture again",
    )


def _name_runs(capture: CaptureFile, main: CapturedRun) -> dict[str, list[list[int]]]:
    """Name -> tokens per prompt, in the order `compare_all` wants: main first, the largest batch before the repeat.

    A prompt that filled a batch up has several answers; each further round is a run of its own.
    """
    found = {MAIN: [list(rows[0]) for rows in main.tokens]}
    others = [run for run in capture.runs if run.error is None and run.kind == "medusa" and run.name != MAIN]
    sized = sorted((run for run in others if run.name not in (REPEAT, STREAMED)), key=lambda run: run.batch_size)
    streamed, repeat, base = capture.run(STREAMED), capture.run(REPEAT), capture.run(BASE_RUN)
    for run in [streamed, *sized]:
        if run is None:
            continue
        rounds = max(len(rows) for rows in run.tokens)
        for number in range(rounds - 1, -1, -1):
            name = run.name if number == 0 else f"{run.name}, place {number + 1}"
            found[name] = [list(rows[number] if number < len(rows) else rows[0]) for rows in run.tokens]
    if repeat is not None:
        found[REPEAT] = [list(rows[0]) for rows in repeat.tokens]
    if base is not None:
        found[GREEDY] = [list(rows[0]) for rows in base.tokens]
    return found


def _judge(
    oracle: LogitsSource,
    prompts: Sequence[Sequence[int]],
    tokens: list[list[int]],
    result: AlignmentResult,
    session: AlignmentSession,
) -> list[JudgedText]:
    """A run's texts; those the main run has too keep its judgement."""
    known = {text.tokens: text for text in result.texts}
    fresh = [index for index, row in enumerate(tokens) if tuple(row) != result.texts[index].tokens]
    judged = judge_texts(
        oracle,
        [prompts[index] for index in fresh],
        [tokens[index] for index in fresh],
        result.noise.near_tie_tolerance,
        end_ids=session.reference.settings.end_ids,
        asked_tokens=session.run.port.alignment.new_tokens,
    )
    found = dict(zip(fresh, judged, strict=True))
    return [found[index] if index in found else known[tuple(row)] for index, row in enumerate(tokens)]


def _acceptance(
    capture: CaptureFile,
    emitted: list[list[int]],
    tree: MedusaTree,
    session: AlignmentSession,
    prompts: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> tuple[list[list[int]] | None, PredictedAcceptance | None]:
    """Accepted lengths of the streamed run, where it said the same as the main run, and what the heads predict."""
    streamed = capture.run(STREAMED)
    if streamed is None or streamed.accepted is None:
        return None, None
    if [list(rows[0]) for rows in streamed.tokens] != emitted:
        return None, None
    predicted = predict_acceptance(session.reference, session.reference_heads, tree, prompts, emitted, dtype)
    end_ids = session.reference.settings.end_ids
    lengths = []
    for observed, expected, row in zip(streamed.accepted, predicted.lengths, emitted, strict=True):
        whole = count_end_token(observed, expected.tolist(), len(row) - 1 if row[-1] in end_ids else None)
        lengths.append(split_merged(whole, expected.tolist()))
    return lengths, predicted


def count_end_token(observed: Sequence[int], predicted: Sequence[int], ended_tokens: int | None) -> list[int]:
    """Steps with the end token counted, which the C++ runtime leaves out (kernels of 0.14.0.dev2024100800).

    Args:
        observed: tokens of each generation step.
        predicted: what a step emits that starts at each token.
        ended_tokens: tokens behind the first, the end token included; None for a text that ran to its length.
    """
    steps, reached = list(observed), sum(observed)
    if ended_tokens is None or ended_tokens - reached != 1:
        return steps
    start = reached - steps[-1] if steps else 0
    if steps and start < len(predicted) and predicted[start] > steps[-1]:
        return [*steps[:-1], steps[-1] + 1]
    return [*steps, 1]


def split_merged(observed: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """Steps that arrived together, taken apart where the heads' own predictions add up to exactly their sum.

    A reader of a stream that is slower than the runtime gets the tokens of several steps at once.
    """
    steps: list[int] = []
    root = 0
    for length in observed:
        parts, at = [], root
        while at < min(root + length, len(predicted)) and predicted[at] > 0:
            parts.append(int(predicted[at]))
            at += int(predicted[at])
        steps += parts if len(parts) > 1 and at == root + length else [int(length)]
        root += length
    return steps


def _tokens_per_step(capture: CaptureFile, emitted: list[list[int]], accepted: list[list[int]] | None) -> float | None:
    """From the stream, else from the steps that the Python session states for calls of one prompt."""
    tokens = sum(len(row) - 1 for row in emitted)
    if accepted is not None:
        steps = sum(map(len, accepted))
    else:
        main = capture.run(MAIN)
        steps = sum(main.steps) if main is not None and main.steps else 0
    return tokens / steps if steps else None


def _compare_logits(
    capture: CaptureFile, oracle: LogitsSource, emitted: list[list[int]]
) -> tuple[tuple[torch.Tensor, ...] | None, float | None]:
    """The engine's logits behind each emitted token, and their worst error against the judge's; None without any."""
    if len(capture.logits) != len(emitted):
        return None, None
    logits = tuple(torch.from_numpy(capture.logits[index])[:, : oracle.vocab_size] for index in range(len(emitted)))
    errors = []
    for prompt, row, ours in zip(capture.prompts, emitted, logits, strict=True):
        theirs = oracle.logits([[*prompt, *row[:-1]]])[0][len(prompt) - 1 :]
        errors.append(relative_error(ours, theirs))
    return logits, max(errors)


def _covered(tokens_per_step: float | None, logits_error: float | None) -> tuple[Coverage, ...]:
    """What such a file shows: the engine it names; the tree only where drafts were seen to be confirmed, the kernels'
    arithmetic only where their logits were compared."""
    found = {Coverage.WEIGHTS, Coverage.MODEL_CODE, Coverage.ENGINE}
    if tokens_per_step is not None and tokens_per_step > 1:
        found.add(Coverage.TREE_AND_ACCEPTANCE)
    if logits_error is not None:
        found.add(Coverage.KERNEL_ARITHMETIC)
    return tuple(item for item in Coverage if item in found)


def _runs_gate(capture: CaptureFile) -> Gate:
    failures = capture.failures
    if failures:
        return Gate(RUNS, False, f"{len(failures)} failed; {failures[0]}")
    if not capture.is_complete:
        return Gate(RUNS, False, "the capture ended early: runs are missing")
    names = ", ".join(run.name for run in capture.runs)
    card = (capture.card or {}).get("name", "an unnamed card")
    return Gate(RUNS, True, f"{names}; {capture.api} of TensorRT-LLM {capture.engine_release} on {card}")
