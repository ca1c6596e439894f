"""A user's existing serving files, as far as Medusa is concerned: Triton's config.pbtxt, and shell scripts.

Both are read as text: no server, no shell and no protobuf library is needed, and nothing in them is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from porting_kit.errors import CapturedFileError

PARAMETER = re.compile(
    r"parameters\s*:?\s*\{\s*key\s*:\s*\"(?P<key>[^\"]+)\"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"
    r"\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*,?\s*\}\s*,?\s*\}"
)
TOP_NUMBER = re.compile(r"^\s*(?P<key>max_batch_size)\s*:\s*(?P<value>\S+)", re.MULTILINE)
DECOUPLED = re.compile(r"decoupled\s*:\s*(?P<value>\S+?)[\s}]")
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
PROGRAMS = ("trtllm-build", "run.py")


@dataclass(frozen=True)
class FoundCommand:
    """A command in a shell script.

    Args:
        program: `trtllm-build` or `run.py`.
        arguments: the words behind it.
        line: its first line's number, from 1.
    """

    program: str
    arguments: tuple[str, ...]
    line: int


def read_text_file(path: str | Path) -> str:
    """A serving file's text. Raises CapturedFileError: missing, empty, or no text."""
    file = Path(path)
    if not file.is_file():
        raise CapturedFileError("the serving file does not exist", where=file)
    data = file.read_bytes()
    if not data.strip():
        raise CapturedFileError("the serving file is empty", found=f"{len(data)} bytes", where=file)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CapturedFileError("the serving file is no text", found=error, where=file) from None


def read_pbtxt(text: str) -> dict[str, str]:
    """Parameters of a config.pbtxt by name, with `max_batch_size` and `decoupled` of the model itself.

    Placeholders of the template (`${decoding_mode}`) stay as they are: the caller decides what they mean.
    """
    text = "\n".join(line.split("#", maxsplit=1)[0] if '"' not in line else line for line in text.splitlines())
    found = {match["key"]: match["value"] for match in PARAMETER.finditer(text)}
    top = TOP_NUMBER.search(text)
    if top:
        found["max_batch_size"] = top["value"]
    decoupled = DECOUPLED.search(text)
    if decoupled:
        found["decoupled"] = decoupled["value"].lower()
    return found


def find_placeholders(settings: dict[str, str]) -> dict[str, str]:
    """Parameter -> name of the placeholder that was never filled in."""
    return {key: match[1] for key, value in settings.items() if (match := PLACEHOLDER.search(value))}


def find_commands(text: str) -> Iterator[FoundCommand]:
    """Build and run commands in a shell script, lines joined where they end in a backslash."""
    joined: list[tuple[int, str]] = []
    start, parts = 1, []
    for number, line in enumerate(text.splitlines(), start=1):
        if not parts:
            start = number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            joined.append((start, " ".join(parts)))
            parts = []
    if parts:
        joined.append((start, " ".join(parts)))
    for number, line in joined:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quotation that goes on over lines: no command of ours
        for place, word in enumerate(words):
            program = next((name for name in PROGRAMS if word == name or word.endswith(f"/{name}")), None)
            if program is not None:
                yield FoundCommand(program, tuple(_until_operator(words[place + 1 :])), number)


def _until_operator(words: list[str]) -> Iterator[str]:
    """The words of one command: up to a pipe, a redirection or the next command."""
    for word in words:
        if word in ("|", "||", "&&", ";", "&") or re.fullmatch(r"\d?[<>]+.*", word):
            return
        if word.endswith(";"):
            yield word.removesuffix(";")
            return
        yield word
