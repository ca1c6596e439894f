"""Read the files that TensorRT-LLM's own run script writes, and say whose they are before anything is compared.

Every file is checked against the prompts it is said to answer: a file of another run must not become a verdict.
This module compares nothing; alignment does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from porting_kit.engine.output_files import (
    find_logits_file,
    load_array,
    read_id_table,
    write_captured_logits,
    write_captured_tokens,
)
from porting_kit.errors import CapturedFileError

__all__ = [
    "CapturedSequence",
    "read_captured_logits",
    "read_captured_tokens",
    "write_captured_logits",
    "write_captured_tokens",
]

SHOWN_TOKENS = 8

UNRELATED, FEW_TOKENS = 0.3, 4
"""Unrelated logits put half of the vocabulary above a token; fewer tokens than a few show nothing."""


@dataclass(frozen=True)
class CapturedSequence:
    """One prompt's answer.

    Args:
        prompt: the prompt's token ids.
        tokens: generated ids up to and with the first end id; the fill behind it is gone.
        ended_by: the end id that ended it, None when it ran to its length.
        ran_past_end: the engine went on behind an end id (it knew of another one only); `tokens` is cut there.
        logits: [len(tokens), Vp] float32, None when none were read.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    ended_by: int | None
    ran_past_end: bool = False
    logits: np.ndarray | None = None


def read_captured_tokens(
    path: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: Sequence[int],
    vocab_size: int,
    max_new_tokens: int | None = None,
    run_end_id: int | None = None,
    pad_id: int | None = None,
) -> tuple[CapturedSequence, ...]:
    """Read an `--output_npy` or `--output_csv` file.

    Args:
        path: the file; told apart by its content, not by its name.
        prompts: token ids of the prompts that were given to the run script, in its order.
        end_ids: every end id of the model; a sequence is cut at the first one.
        vocab_size: V; ids at or above it are refused.
        max_new_tokens: `--max_output_len` of that run; with it, fill and output are told apart for certain.
        run_end_id: the one end id the run used to stop and to fill rows; when None, the one that fills the rows.
        pad_id: a second id that may fill rows (the Python session leaves it behind short prompts).

    Raises:
        CapturedFileError: unreadable or empty, another batch, another prompt (or cut, shifted, missing), another fill
            id, rows shorter than their prompts, ids outside the vocabulary.
    """
    file = Path(path)
    if not end_ids:
        raise CapturedFileError(
            "no end id is known",
            expected="at least one",
            found="none",
            where=file,
            next_step="name the end id of the base's generation settings",
        )
    rows = read_id_table(file)
    _check_batch(rows, prompts, file)
    outside = sorted({int(token) for token in rows[(rows < 0) | (rows >= vocab_size)]})
    if outside:
        raise CapturedFileError(
            "the file holds token ids outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            where=file,
            items=outside,
            next_step="the file was written by another model, or is not an output file of run.py",
        )
    stop = _find_fill(rows, prompts, end_ids, max_new_tokens) if run_end_id is None else run_end_id
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        _check_prompt(row, prompt, prompts, index, file)
    _check_length(rows, prompts, stop, max_new_tokens, file)
    fill = {stop} if pad_id is None else {stop, pad_id}
    sequences = []
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        output = _strip_fill(row[len(prompt) :], stop, fill, max_new_tokens, index, file)
        sequences.append(_cut_at_end(tuple(int(token) for token in prompt), output, tuple(end_ids), stop))
    return tuple(sequences)


def read_captured_logits(
    path: str | Path, sequences: Sequence[CapturedSequence], *, vocab_size: int
) -> tuple[CapturedSequence, ...]:
    """Add generation logits to sequences that `read_captured_tokens` returned.

    Args:
        path: NAME_generation.npy, or the NAME.npy that was given to `--output_logits_npy`.
        sequences: one a prompt, in file order.
        vocab_size: V; the file holds V or more columns (padded vocabulary).

    Raises:
        CapturedFileError: unreadable, not float32, another batch, fewer rows than tokens, fewer columns than V, not
            finite, or a largest logit that is not the emitted token anywhere (another run's logits).
    """
    file = find_logits_file(Path(path))
    logits = load_array(file)
    if logits.ndim == 4 and logits.shape[1] == 1:
        logits = logits[:, 0]
    needed = max((len(sequence.tokens) for sequence in sequences), default=0)
    expected = f"[{len(sequences)}, at least {needed}, at least {vocab_size}] float32"
    shape_fits = (
        logits.ndim == 3
        and logits.shape[0] == len(sequences)
        and logits.shape[1] >= needed
        and logits.shape[2] >= vocab_size
    )
    if not shape_fits or logits.dtype != np.float32:
        raise CapturedFileError(
            "the logits do not fit the tokens",
            expected=expected,
            found=f"{list(logits.shape)} {logits.dtype}",
            where=file,
            next_step="bring the logits of the same run: --output_logits_npy beside the tokens",
        )
    with_logits = []
    for index, sequence in enumerate(sequences):
        own = logits[index, : len(sequence.tokens)]
        if not np.isfinite(own[:, :vocab_size]).all():
            row = int(np.argwhere(~np.isfinite(own[:, :vocab_size]))[0, 0])
            raise CapturedFileError(
                "the logits are not finite",
                expected="finite logits",
                found=f"{int((~np.isfinite(own[:, :vocab_size])).sum())} values, the first at new token {row}",
                where=f"{file}, row {index}",
                next_step="the engine itself overflows: try bfloat16, and check the reference in this type",
            )
        with_logits.append(replace(sequence, logits=own))
    _check_logits_belong(with_logits, vocab_size, file)
    return tuple(with_logits)


def _find_fill(
    rows: np.ndarray, prompts: Sequence[Sequence[int]], end_ids: Sequence[int], max_new_tokens: int | None
) -> int:
    """The end id that stands where nothing but fill can stand: run.py knows one of a model's end ids, not always the
    first. The first of all where no row shows it."""
    found = set()
    for row, prompt in zip(rows, prompts, strict=True):
        behind = row[len(prompt) + max_new_tokens :] if max_new_tokens is not None else row[:0]
        tail = row[-2:] if len(row) >= len(prompt) + 2 and row[-1] == row[-2] else row[:0]
        found |= {int(token) for token in (*behind, *tail)}
    shown = found & set(end_ids)
    return shown.pop() if len(shown) == 1 else end_ids[0]


def _check_length(
    rows: np.ndarray, prompts: Sequence[Sequence[int]], stop: int, max_new_tokens: int | None, file: Path
) -> None:
    """The answer to the longest prompt fills the file: without an end id in it, that is what the run was asked for."""
    index = max(range(len(prompts)), key=lambda place: len(prompts[place]), default=0)
    answer = rows[index][len(prompts[index]) :]
    if len(answer) == 0:
        raise CapturedFileError(
            "the file holds the prompts alone",
            expected="at least one new token a prompt",
            found=f"{rows.shape[1]} columns, as many as the longest prompt has tokens",
            where=file,
            next_step="run the script with --max_output_len",
        )
    if max_new_tokens is not None and len(answer) < max_new_tokens and stop not in answer:
        raise CapturedFileError(
            "the run was asked for fewer tokens than the port names, or the file was cut",
            expected=f"{max_new_tokens} new tokens, or an end id before",
            found=f"{len(answer)} behind the longest prompt",
            where=f"{file}, row {index}",
            next_step=f"write alignment: {{new_tokens: {len(answer)}}}, or run with --max_output_len {max_new_tokens}",
        )


def _check_batch(rows: np.ndarray, prompts: Sequence[Sequence[int]], file: Path) -> None:
    if len(rows) == len(prompts):
        return
    beams = f" ({len(rows) // len(prompts)} beams a prompt?)" if prompts and len(rows) % len(prompts) == 0 else ""
    raise CapturedFileError(
        "the file answers another number of prompts",
        expected=f"{len(prompts)} rows, one a prompt",
        found=f"{len(rows)} rows{beams}",
        where=file,
        next_step="run the script with these prompts, one beam",
    )


def _check_prompt(
    row: np.ndarray, prompt: Sequence[int], prompts: Sequence[Sequence[int]], index: int, file: Path
) -> None:
    size = len(prompt)
    where = f"{file}, row {index}"
    if len(row) < size:
        raise CapturedFileError(
            "the rows are shorter than the prompt",
            expected=f"at least {size} ids",
            found=len(row),
            where=where,
            next_step="run the engine on the port's own prompts again",
        )
    if list(row[:size]) == list(prompt):
        return
    raise CapturedFileError(
        _explain_prompt(row, prompt, prompts, index),
        expected=f"{list(prompt)[:SHOWN_TOKENS]} ... ({size} prompt tokens)",
        found=f"{row[:SHOWN_TOKENS].tolist()} ...",
        where=where,
        next_step="give the run script these prompts as token ids (--input_file prompts.csv), with "
        "--max_input_length at least as long",
    )


def _explain_prompt(row: np.ndarray, prompt: Sequence[int], prompts: Sequence[Sequence[int]], index: int) -> str:
    """Which mistake it is, most telling first."""
    ids, wanted = row.tolist(), list(prompt)
    for other, candidate in enumerate(prompts):
        if other != index and ids[: len(candidate)] == list(candidate):
            return f"the row answers prompt {other}: the rows are in another order"
    for cut in range(1, len(wanted)):
        kept = wanted[cut:]
        if len(kept) >= 2 and ids[: len(kept)] == kept:
            what = "first token is" if cut == 1 else f"first {cut} tokens are"
            return f"the prompt was cut: its {what} missing" + (" (a start token?)" if cut == 1 else "")
    for shift in range(1, len(ids) - len(wanted) + 1):
        if ids[shift : shift + len(wanted)] == wanted:
            extra = "a token stands" if shift == 1 else f"{shift} tokens stand"
            return f"{extra} before the prompt (left padding, or a start token added twice)"
    same = next((at for at, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), 0)
    if same == 0:
        return "the row does not begin with its prompt: it holds another prompt, or generated ids only"
    return f"the row answers another prompt: it differs from token {same} on"


def _strip_fill(
    output: np.ndarray, stop: int, fill: set[int], max_new_tokens: int | None, index: int, file: Path
) -> list[int]:
    """The generated ids of a row, with the end id that ended it and without the fill.

    A row that ran to its full length may have no end id; one that ended early has at least the end id itself.
    """
    ids = output.tolist()
    first_stop = next((at for at, token in enumerate(ids) if token == stop), None)
    limit = len(ids) if max_new_tokens is None else min(max_new_tokens, len(ids))
    end = limit if first_stop is None or first_stop >= limit else first_stop + 1
    strangers = [(at, token) for at, token in enumerate(ids[end:], start=end) if token not in fill]
    if not strangers:
        return ids[:end]
    at, token = strangers[0]
    constant = {ids[position] for position in range(end, len(ids))} - fill == {token} and ids[-1] == token
    raise CapturedFileError(
        f"the row is filled with {token}, not with the end id"
        if constant
        else "tokens go on behind the end of the sequence",
        expected=f"{' or '.join(map(str, sorted(fill)))} from column {end} of the output on",
        found=f"{token} at column {at}",
        where=f"{file}, row {index}",
        next_step="run with the base's own end id (--end_id) and alignment.new_tokens as --max_output_len",
    )


def _cut_at_end(prompt: tuple[int, ...], output: list[int], end_ids: tuple[int, ...], stop: int) -> CapturedSequence:
    at = next((position for position, token in enumerate(output) if token in end_ids), None)
    if at is None:
        return CapturedSequence(prompt, tuple(output), output[-1] if output and output[-1] == stop else None)
    return CapturedSequence(prompt, tuple(output[: at + 1]), output[at], ran_past_end=at + 1 < len(output))


def _check_logits_belong(sequences: Sequence[CapturedSequence], vocab_size: int, file: Path) -> None:
    """Emitted tokens stand high in their own logits, even sampled ones; in another run's they stand anywhere."""
    ranks = []
    for sequence in sequences:
        tokens = np.array(sequence.tokens)
        inside = tokens < vocab_size
        rows = sequence.logits[: len(tokens), :vocab_size][inside]
        own = np.take_along_axis(rows, tokens[inside][:, None], axis=-1)
        ranks += ((rows > own).sum(axis=-1) / vocab_size).tolist()
    typical = float(np.mean(ranks)) if ranks else 0.0
    if typical > UNRELATED and len(ranks) >= FEW_TOKENS:
        raise CapturedFileError(
            "the logits belong to another run",
            expected="the emitted token has the largest logit almost everywhere",
            found=f"on average {typical:.0%} of the vocabulary stands above it, in {len(ranks)} tokens",
            where=file,
            next_step="name the logits that the same call of the run script wrote, in the same order of prompts",
        )
