"""Read the file that the capture script wrote, and say whose it is before anything is compared.

The file answers for itself: it holds the prompts and the tree it was made with, the engine's version and limits, the
card, and every run with its tokens or its error. This module compares it with the port; alignment judges the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from porting_kit.engine.capture_evidence import FORMAT
from porting_kit.engine.engine_config import name_mode
from porting_kit.engine.messages import RecognisedMessage, recognise_messages
from porting_kit.errors import CapturedFileError
from porting_kit.releases.build_flags import compare_releases

ZIP_MAGIC = b"PK\x03\x04"
MAIN, STREAMED, REPEAT = "medusa batch 1", "streamed", "repeat"


@dataclass(frozen=True)
class CapturedRun:
    """One way of running all prompts.

    Args:
        name: `medusa batch 1`, `medusa batch 4`, `repeat`, `streamed`, `base batch 1`.
        kind: `medusa`, or `base` for an engine without heads.
        batch_size: requests per call.
        tokens: per prompt, its answers in the order of the calls: several when a prompt filled a batch up.
        accepted: per prompt, tokens of each generation step; None when the runtime did not offer them.
        steps: generation steps of each call; None when the runtime did not offer them.
        error: what it ended with, None when it went through.
    """

    name: str
    kind: str
    batch_size: int
    tokens: tuple[tuple[tuple[int, ...], ...], ...] = ()
    accepted: tuple[tuple[int, ...], ...] | None = None
    steps: tuple[int, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class CaptureFile:
    """A whole captured file.

    Args:
        where: the file.
        request: what the script was asked for: port, prompts, tree, end ids.
        engine_release: the release that built the engine.
        api: how it was run.
        card: name and compute capability, None when unknown.
        environment: versions.
        runs: in order; failed ones too.
        logits: prompt number -> float32 [tokens, Vp] of the main run; empty when none were kept.
        died: code and end of the log, when the process went down.
        is_complete: every run was tried.
        build_config: plain settings of the engine's own config.json.
    """

    where: Path
    request: Mapping[str, Any]
    engine_release: str
    api: str | None
    card: Mapping[str, str] | None
    environment: Mapping[str, str]
    runs: tuple[CapturedRun, ...]
    logits: Mapping[int, np.ndarray]
    died: Mapping[str, Any] | None
    is_complete: bool
    build_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids."""
        return self.request["prompts"]

    def run(self, name: str) -> CapturedRun | None:
        """A run that went through, None when there is none of that name."""
        return next((run for run in self.runs if run.name == name and run.error is None), None)

    @property
    def failures(self) -> list[str]:
        """One sentence for each run that failed, and for a process that went down."""
        found = []
        for run in self.runs:
            if run.error is not None:
                found.append(f"{run.name}: {_explain(run.error)}")
        if self.died is not None:
            found.append(f"the process ended with code {self.died['code']}: {_explain(str(self.died['log']))}")
        return found

    @property
    def messages(self) -> tuple[RecognisedMessage, ...]:
        """Catalogue entries found in the errors and in the end of the log."""
        text = "\n".join([run.error or "" for run in self.runs] + [str((self.died or {}).get("log", ""))])
        return recognise_messages(text.splitlines())


def _explain(text: str) -> str:
    """Name and cause of the first message the catalogue knows, else the last line."""
    known = recognise_messages(text.splitlines())
    if known:
        return f"{known[0].message.name}: {known[0].message.cause}"
    return text.strip().splitlines()[-1] if text.strip() else "no message"


def is_capture_file(path: Path) -> bool:
    """Whether a file is one of the capture script's (an .npz), and not one of run.py's. False when nothing is there."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def read_capture_file(path: str | Path) -> CaptureFile:
    """Read a file of the capture script.

    Raises:
        CapturedFileError: missing, empty, cut off, not such a file, or of another format.
    """
    file = Path(path)
    if not file.is_file():
        raise CapturedFileError(
            "the captured file does not exist",
            expected="the .npz file that engine/capture.py writes",
            found="no such file",
            where=file,
            next_step="bring engine/captured.npz back",
        )
    if file.stat().st_size == 0:
        raise CapturedFileError(
            "the captured file is empty",
            expected="the .npz file that engine/capture.py writes",
            found="0 bytes",
            where=file,
            next_step="copy it again",
        )
    try:
        with np.load(file, allow_pickle=False) as archive:
            if "document" not in archive.files:
                raise CapturedFileError(
                    "not an archive of the capture script",
                    expected="the .npz file that engine/capture.py writes, which holds a document",
                    found=f"arrays {', '.join(archive.files[:5]) or 'none'}",
                    where=file,
                    next_step="name that file, or run.py's --output_npy or --output_csv",
                )
            document = json.loads(archive["document"].tobytes().decode())
            arrays = {name: archive[name] for name in archive.files if name != "document"}
    except (BadZipFile, ValueError, OSError, EOFError, KeyError) as error:
        raise CapturedFileError(
            "the captured file cannot be read",
            expected="the .npz file that engine/capture.py writes",
            found=error,
            where=file,
            next_step="copy it again: it may be cut off",
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CapturedFileError(
            "the captured file is of another format",
            expected=f"format {FORMAT}",
            found=document.get("format") if isinstance(document, dict) else type(document).__name__,
            where=file,
            next_step="run the build step again, and capture with the script it writes",
        )
    try:
        return _assemble(file, document, arrays)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CapturedFileError(
            "the captured file lacks a part",
            expected="every part that engine/capture.py writes",
            found=repr(error),
            where=file,
            next_step="capture again with the script that the build step writes",
        ) from None


def _assemble(file: Path, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> CaptureFile:
    request = document["request"]
    logits = {}
    for name, array in arrays.items():
        _, run, prompt = name.split("/")
        if run == MAIN:
            logits[int(prompt)] = array
    return CaptureFile(
        where=file,
        request=request,
        engine_release=str(document["engine"]["version"]),
        api=document["api"],
        card=document["card"],
        environment=document["environment"],
        runs=tuple(_read_run(run, len(request["prompts"])) for run in document["runs"]),
        logits=logits,
        died=document.get("died"),
        is_complete=bool(document["complete"]),
        build_config=document["engine"].get("build_config") or {},
    )


def _read_run(run: Mapping[str, Any], num_prompts: int) -> CapturedRun:
    size = int(run.get("batch_size", 1))
    if "error" in run:
        return CapturedRun(run["name"], run["kind"], size, error=run["error"])
    tokens: list[list[tuple[int, ...]]] = [[] for _ in range(num_prompts)]
    accepted: dict[int, tuple[int, ...]] = {}
    for call, group in enumerate(run["groups"]):
        for row, prompt in enumerate(group):
            tokens[prompt].append(tuple(int(token) for token in run["tokens"][call][row]))
            if run["accepted"][call]:
                accepted[prompt] = tuple(int(length) for length in run["accepted"][call][row])
    steps = run.get("steps") or []
    return CapturedRun(
        run["name"],
        run["kind"],
        size,
        tuple(tuple(rows) for rows in tokens),
        tuple(accepted[prompt] for prompt in range(num_prompts)) if len(accepted) == num_prompts else None,
        tuple(steps) if steps and None not in steps else None,
    )


def _check_engine(capture: CaptureFile, num_drafts: int) -> None:
    """The engine's mode and draft limit, as far as the file states them: either explains all the other differences."""
    mode, limit = (
        name_mode(capture.build_config.get("speculative_decoding_mode")),
        capture.build_config.get("max_draft_len"),
    )
    if mode not in (None, "medusa"):
        raise CapturedFileError(
            f"the engine that was captured runs in another mode: {mode}",
            expected="medusa",
            found=mode,
            where=capture.where,
            next_step="build with the planned command, and capture again",
        )
    if isinstance(limit, int) and limit < num_drafts:
        raise CapturedFileError(
            f"the engine that was captured allows {limit} draft tokens a step",
            expected=f"at least {num_drafts}, the drafts of the port's tree",
            found=f"max_draft_len {limit}",
            where=capture.where,
            next_step="build with the planned command, or use a smaller tree, and capture again",
        )


def check_capture(
    capture: CaptureFile,
    *,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Sequence[int]],
    vocab_size: int,
    new_tokens: int,
    checkpoint: str,
    planned_release: str | None = None,
) -> None:
    """Refuse a file that answers for another port, or from an engine of another release.

    Args:
        capture: from `read_capture_file`.
        prompts: the port's; the file may hold fewer, when some are too long for the engine.
        choices: the port's tree.
        vocab_size: V.
        new_tokens: what the port asks for.
        checkpoint: digest of the port's checkpoint, from `capture_kit.digest_checkpoint`.
        planned_release: the release of the plan; None leaves it out.

    Raises:
        CapturedFileError: an engine of another mode or of too small a draft limit; another port's prompts, tree, length
            or checkpoint; ids outside the vocabulary; an engine of a release that differs in what matters here.
    """
    request, where = capture.request, capture.where
    _check_engine(capture, len(choices))
    known = {tuple(prompt) for prompt in prompts}
    strangers = [index for index, prompt in enumerate(capture.prompts) if tuple(prompt) not in known]
    again = "run the build step again for this port, and capture with the script it writes"
    if strangers:
        raise CapturedFileError(
            f"the captured file answers for another port: {request.get('port')!r}",
            expected="this port's prompts",
            found=f"{len(strangers)} of {len(capture.prompts)} prompts are not among them",
            where=where,
            next_step=again,
        )
    facts = {
        "tree": (request["medusa_choices"], [list(path) for path in choices]),
        "number of new tokens": (request["new_tokens"], new_tokens),
        "checkpoint": (request["checkpoint"], checkpoint),
    }
    for name, (found, expected) in facts.items():
        if found != expected:
            raise CapturedFileError(
                f"the captured file was made with another {name}",
                expected=str(expected)[:80],
                found=str(found)[:80],
                where=where,
                next_step=again,
            )
    outside = sorted(
        {
            token
            for run in capture.runs
            for rows in run.tokens
            for row in rows
            for token in row
            if not 0 <= token < vocab_size
        }
    )
    if outside:
        raise CapturedFileError(
            "the file holds token ids outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            where=where,
            items=outside,
            next_step="the runtime read its output buffers wrongly, or the vocabulary is padded and not masked",
        )
    if planned_release is not None and capture.engine_release != planned_release:
        differences = compare_releases(planned_release, capture.engine_release)
        if differences:
            raise CapturedFileError(
                "the engine is of another release than the one planned for",
                expected=planned_release,
                found=capture.engine_release,
                where=where,
                items=[f"{item.subject}: {item.first} -> {item.second}" for item in differences],
                next_step=f"set trtllm.release to {capture.engine_release}, convert and build again",
            )
