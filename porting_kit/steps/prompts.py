"""The prompts an alignment runs on, as token ids: from the port's list or file, or the package's own few.

They are tokenised once, with the base's own tokenizer, and only ids go on from here.
"""

from __future__ import annotations

import random
from typing import Any

from porting_kit.errors import PortFileError
from porting_kit.port import Port

SEPARATOR = "---"
DEFAULT_PROMPTS = (
    "The",
    "def fibonacci(n):\n    ",
    "A list is a sequence of values. To add a value at the end of a list, call",
    "Write one sentence about the sea.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "When a function returns before it has done its work, the caller cannot know what was left undone. A good program "
    "says what it did, what it did not do, and what the reader should do next. It keeps what was there before until "
    "the new result is complete, and it never shows a half-written file as if it were whole. This is true of",
    "Q: What is the difference between a process and a thread?\nA:",
    "1, 2, 4, 8, 16,",
)
CAPTURED_PAGE = "notebooks/howto/captured_engine.md"
PROBE = "The sea"
"""transformers makes an empty tokenizer for a folder without tokenizer files: it turns every text into nothing."""
RANDOM_LENGTHS = (3, 17, 40, 66, 5, 29, 12, 8)


def read_prompts(port: Port) -> list[str]:
    """The port's prompts as texts.

    Raises:
        PortFileError: the file is missing, or there is no prompt.
    """
    prompts = port.alignment.prompts
    if isinstance(prompts, list):
        texts = prompts
    elif prompts == "default":
        texts = list(DEFAULT_PROMPTS)
    else:
        file = port.resolve_path(prompts)
        if not file.is_file():
            raise PortFileError(
                "the prompts file does not exist",
                expected="a text file with a prompt a line",
                found="a folder" if file.is_dir() else "no such file",
                where=file,
                next_step="correct alignment.prompts",
            )
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PortFileError(
                "the prompts file cannot be read",
                expected="UTF-8 text",
                found=error,
                where=file,
                next_step="save the file as UTF-8, or correct alignment.prompts",
            ) from error
        texts = _split(lines) if SEPARATOR in lines else lines
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise PortFileError(
            "there is no prompt to align on",
            expected="at least one text",
            found=repr(prompts)[:80],
            next_step="write one into alignment.prompts, or prompts: default",
        )
    return texts


def require_prompts(port: Port) -> None:
    """Find now what would stop the alignment later: the prompts, and the files brought back from an engine.

    Raises:
        PortFileError: see `read_prompts` and `require_captured`.
    """
    read_prompts(port)
    require_captured(port, always=True)


def require_captured(port: Port, *, always: bool = False) -> None:
    """Find the file brought back from an engine that the port is aligned with; patch, convert and build come before it.

    Args:
        always: look for a file that is named though the port runs in the emulator, too.

    Raises:
        PortFileError: `alignment.captured` is not set and `engine` asks for it, or names no file.
    """
    if port.engine == "captured" and port.alignment.captured is None:
        raise PortFileError(
            "the port has engine: captured and names no captured file",
            expected="alignment.captured: the file that engine/capture.py, or TensorRT-LLM's run script, wrote",
            found="alignment.captured is not set",
            where=f"port {port.name!r}",
            next_step="bring the file back from the build machine and set it: -p alignment.captured=captured.npz; "
            f"without one align with -p engine=emulator ({CAPTURED_PAGE} has the steps)",
        )
    captured = port.alignment.captured if always or port.engine == "captured" else None
    if captured is not None and not port.resolve_path(captured).is_file():
        raise PortFileError(
            "the captured file does not exist",
            expected="a file of run.py or of the capture script",
            found="a folder" if port.resolve_path(captured).is_dir() else "nothing",
            where=port.resolve_path(captured),
            next_step=f"bring the engine's output file here, or correct alignment.captured ({CAPTURED_PAGE})",
        )


def _split(lines: list[str]) -> list[str]:
    texts: list[list[str]] = [[]]
    for line in lines:
        if line == SEPARATOR:
            texts.append([])
        else:
            texts[-1].append(line)
    return ["\n".join(text) for text in texts]


def tokenize_prompts(port: Port, tokenizer: Any, vocab_size: int) -> tuple[list[list[int]], str]:
    """Token ids of the prompts, and a sentence that says where they came from.

    Without a tokenizer the default prompts become random ids with a fixed seed; prompts that the port names need one.

    Raises:
        PortFileError: texts are named and the base has no tokenizer, or an id lies outside the vocabulary.
    """
    if not can_tokenize(tokenizer):
        if port.alignment.prompts != "default":
            raise PortFileError(
                "the base model brings no tokenizer, so texts cannot be used as prompts",
                expected="tokenizer files beside the weights",
                found=f"alignment.prompts in port {port.name!r}",
                where=port.base_path,
                next_step="put the tokenizer beside the weights, or write prompts: default for random token ids",
            )
        generator = random.Random(0)
        ids = [[generator.randrange(vocab_size) for _ in range(length)] for length in RANDOM_LENGTHS]
        return ids, "random token ids, seed 0: the base brings no tokenizer"
    ids = [list(tokenizer(text)["input_ids"]) for text in read_prompts(port)]
    longest = max(max(row, default=0) for row in ids)
    if longest >= vocab_size or not all(ids):
        raise PortFileError(
            "the tokenizer does not belong to the base model",
            expected=f"prompts of at least one token, ids below {vocab_size}",
            found=f"largest id {longest}",
            where=port.base_path,
            next_step="put the base's own tokenizer beside the weights",
        )
    return ids, f"{len(ids)} texts, {min(map(len, ids))} to {max(map(len, ids))} tokens"


def can_tokenize(tokenizer: Any) -> bool:
    """Whether there is a tokenizer that turns text into tokens."""
    return tokenizer is not None and bool(tokenizer(PROBE)["input_ids"])
