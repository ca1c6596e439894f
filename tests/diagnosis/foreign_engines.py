"""Engines of other people: plain PyTorch models with one thing wrong, what their files look like, and their diagnosis.

Nothing here comes from the catalogue of faults. The engine is the Hugging Face model itself, changed as a faulty
converter, model file or run would have changed it (`foreign_faults`), and decoded by a loop of this module. What it
says is written to the files that TensorRT-LLM's run script writes, and read back as `porting-kit diagnose` reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from porting_kit.alignment.inherent import matched_to_library
from porting_kit.alignment.reference import load_reference, resolve_dtype
from porting_kit.alignment.run import AlignmentOptions, align_captured_outputs
from porting_kit.diagnosis import Diagnosis, name_cause, observe
from porting_kit.diagnosis.observation import PADDED_TO
from porting_kit.diagnosis.search import Shelf
from porting_kit.engine.captured import read_captured_logits, read_captured_tokens
from tests.alignment.tiny_ports import TinyPort

NEW_TOKENS = 24

Choose = Callable[[torch.Tensor, Sequence[int], int, torch.Generator], int]


def take_best(logits: torch.Tensor, text: Sequence[int], start: int, generator: torch.Generator) -> int:
    """Greedy."""
    return int(logits.argmax())


@dataclass(frozen=True)
class Engine:
    """One way an engine can be made.

    Args:
        name: what is done to it, in words.
        bases: keys of the ports that it is made of.
        accepts: names that are right for it; None for "none of these"; an empty tuple when nothing is wrong with it.
        spoil: changes the model in place; what it returns, a context manager, stays open while the engine runs.
        choose: (logits [V], text so far, where its output begins, generator) -> next token.
        reads: what the engine is given for the prompts; its file holds the prompts that were meant.
        dtype: it computes in.
        attention: implementation; None is the reference's own.
    """

    name: str
    bases: tuple[str, ...]
    accepts: tuple[str | None, ...]
    spoil: Callable[[Any], Any] | None = None
    choose: Choose = take_best
    reads: Callable[[Sequence[Sequence[int]], list[list[int]]], list[list[int]]] | None = None
    dtype: str = "float32"
    attention: str | None = None


@dataclass(frozen=True)
class Answers:
    """What an engine said: tokens per prompt, and the logits [n, V] that chose them."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


@torch.inference_mode()
def run_engine(port: TinyPort, engine: Engine, new_tokens: int = NEW_TOKENS, seed: int = 0) -> Answers:
    """Decode without a cache: every text goes through the model as a whole, one token after the other."""
    opened = load_reference(port.folder / "base", dtype=engine.dtype, attention=engine.attention)
    end_ids, V = opened.settings.end_ids, opened.vocab_size
    generator = torch.Generator().manual_seed(seed)
    answers = Answers([], [])
    with contextlib.ExitStack() as stack:
        stack.enter_context(matched_to_library(opened, port.differences))
        changed = engine.spoil(opened.model) if engine.spoil is not None else None
        if changed is not None and hasattr(changed, "__enter__"):
            stack.enter_context(changed)
        for index, meant in enumerate(port.prompts):
            prompt = meant if engine.reads is None else engine.reads(port.prompts[: index + 1], answers.tokens)[-1]
            text, rows = list(prompt), []
            while len(rows) < new_tokens and (not rows or text[-1] not in end_ids):
                logits = opened.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1, :V].float()
                rows.append(logits)
                text.append(engine.choose(logits, text, len(prompt), generator))
            answers.tokens.append(text[len(prompt) :])
            answers.logits.append(torch.stack(rows))
    return answers


def write_files(port: TinyPort, answers: Answers, folder: Path, new_tokens: int = NEW_TOKENS) -> tuple[Path, Path]:
    """Files as run.py writes them: int32 [batch, length] filled with the end id; float32 [batch, steps, Vp]."""
    end_id, V = port.reference.settings.end_ids[0], port.reference.vocab_size
    length = max(map(len, port.prompts)) + new_tokens
    ids = np.full((len(port.prompts), length), end_id, dtype=np.int32)
    logits = np.zeros((len(port.prompts), new_tokens, -(-V // PADDED_TO) * PADDED_TO), dtype=np.float32)
    for index, (prompt, row, rows) in enumerate(zip(port.prompts, answers.tokens, answers.logits, strict=True)):
        text = [*prompt, *row]
        ids[index, : len(text)] = text
        logits[index, : len(rows), :V] = rows.numpy()
    files = folder / "output.npy", folder / "output_logits_generation.npy"
    np.save(files[0], ids)
    np.save(files[1], logits)
    return files


def diagnose_files(
    port: TinyPort,
    tokens_file: Path,
    logits_file: Path | None = None,
    *,
    dtype: str = "float32",
    new_tokens: int = NEW_TOKENS,
    shelf: Shelf | None = None,
    pair_seconds: float = 0.0,
) -> Diagnosis:
    """The diagnosis of an engine's files, in the steps of `porting-kit diagnose`.

    Args:
        port: the healthy port; its state stands for the checkpoint.
        tokens_file, logits_file: as the run script writes them.
        dtype: what the port file says of the engine.
        new_tokens: that were asked for.
        shelf: models of this port that were built before.
        pair_seconds: for two faults at once.
    """
    reference = port.reference
    V, end_ids = reference.vocab_size, reference.settings.end_ids
    padded = -(-V // PADDED_TO) * PADDED_TO
    sequences = read_captured_tokens(
        tokens_file, port.prompts, end_ids=end_ids, vocab_size=padded, max_new_tokens=new_tokens
    )
    if logits_file is not None:
        sequences = read_captured_logits(logits_file, sequences, vocab_size=V)
    emitted = [list(sequence.tokens) for sequence in sequences]
    options = AlignmentOptions(new_tokens=new_tokens, differences=port.differences)
    judged = align_captured_outputs(reference, port.prompts, emitted, resolve_dtype(dtype), options=options)
    observation = replace(observe(judged), overrun=[sequence.ran_past_end for sequence in sequences])
    if logits_file is not None:
        rows = [torch.from_numpy(sequence.logits[:, :V]) for sequence in sequences]
        observation = replace(observation, logits=rows)
    return name_cause(port.state, observation, result=judged, shelf=shelf, pair_seconds=pair_seconds)


def describe(diagnosis: Diagnosis) -> str:
    """What was said, in a word or two."""
    if diagnosis.own_model is not None:
        return "own model"
    if diagnosis.rounding is not None:
        return f"rounding of {diagnosis.rounding.dtype}"
    if diagnosis.to_explain == 0:
        return "nothing to explain"
    named = " + ".join(sorted(fault.name for fault in diagnosis.causes)) or "none of these"
    ties = ", ".join(tie.name for tie in diagnosis.ties)
    doubt = "" if not diagnosis.causes or diagnosis.is_sure else "perhaps "
    return f"{doubt}{named} (tied with {ties})" if ties else doubt + named


def judge_diagnosis(engine: Engine, diagnosis: Diagnosis) -> str:
    """How right the diagnosis is.

    Returns:
        "right"; "tied", the right name is among equals; "missed", nothing was named; "wrong"; "doubtful", a wrong name
        that is said to be uncertain; "blamed", a clean engine; "excused", a fault taken for rounding; "no effect", the
        fault changed nothing that was observed.
    """
    if diagnosis.is_healthy:
        return "right" if not engine.accepts else "excused" if diagnosis.rounding is not None else "no effect"
    if not engine.accepts:
        return "blamed"
    first = " + ".join(sorted(fault.name for fault in diagnosis.causes)) or None
    names = {first, *(tie.name for tie in diagnosis.ties)}
    if names <= set(engine.accepts):
        return "right"
    if names & set(engine.accepts):
        return "tied"
    if names == {None}:
        return "missed"
    return "wrong" if diagnosis.is_sure else "doubtful"
