"""What the library's messages mean: from text in a log to cause and next step.

The entries are in `build_messages` and `run_messages`. A log may come from another machine, cut anywhere, with bytes
that are no text: `read_log` takes what is there and says how far it got.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from porting_kit.engine.build_messages import BUILD_MESSAGES
from porting_kit.engine.library_message import LibraryMessage
from porting_kit.engine.run_messages import RUN_MESSAGES
from porting_kit.errors import CapturedFileError

CATALOGUE: tuple[LibraryMessage, ...] = (*BUILD_MESSAGES, *RUN_MESSAGES)
# What the build prints as it goes (builder.py, commands/build.py, _common.py, 0.8 to 0.16), in that order.
PHASES: tuple[tuple[str, str], ...] = (
    ("library loaded", r"TensorRT-LLM version: "),
    ("network made", r"Total time of constructing network"),
    ("engine being built", r"Build TensorRT engine "),
    ("engine built", r"Total time of building (?!all engines)"),
    ("engine being written", r"Serializing engine to "),
    ("engine written", r"Engine serialized\. "),
    ("all engines built", r"Total time of building all engines"),
)
LAST_PHASE = PHASES[-1][0]
VERSION_LINE = re.compile(r"TensorRT-LLM version: (\S+)")
TRACEBACK = "Traceback (most recent call last)"
EXCEPTION_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)*([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$")


@dataclass(frozen=True)
class RecognisedMessage:
    """A catalogue entry found in a log: the entry, the line, and its number from 1."""

    message: LibraryMessage
    line: str
    line_number: int


@dataclass(frozen=True)
class LogReading:
    """What a log says.

    Args:
        messages: catalogue entries, in order of appearance.
        phases: names of the build's phases that were reached.
        release: the release the library stated, None when its line is not there.
        is_complete: the build's last line is there.
        lines: how many there are.
        exception: the last line of the last Python traceback, with its number; None without one.
    """

    messages: tuple[RecognisedMessage, ...]
    phases: tuple[str, ...]
    release: str | None
    is_complete: bool
    lines: int
    exception: str | None = None

    @property
    def summary(self) -> str:
        """One sentence: finished, the first fatal message, or where the log breaks off."""
        fatal = next((found for found in self.messages if found.message.fatal), None)
        if fatal is not None:
            return f"{fatal.message.name}, line {fatal.line_number}: {fatal.message.cause}"
        if self.is_complete:
            return "the build finished"
        if self.exception is not None:
            return f"ended by an exception that the catalogue does not know: {self.exception}"
        reached = f"after {self.phases[-1]!r}" if self.phases else "before the library said anything"
        return f"the log breaks off {reached} with no message the catalogue knows"

    @property
    def next_step(self) -> str | None:
        """What to do: the first fatal message's remedy, or how to get the rest of a log that breaks off."""
        fatal = next((found for found in self.messages if found.message.fatal), None)
        if fatal is not None:
            return fatal.message.next_step
        if self.is_complete:
            return None
        if self.exception is not None:
            return "read the traceback above it in the log: its last frame inside tensorrt_llm names the step"
        return "bring the whole log, or look for a killed process: `dmesg` names one that ran out of memory"


def read_log(path: str | Path) -> LogReading:
    """Read a build's or a run's log.

    Raises:
        CapturedFileError: no such file, an empty one, or one that is no text.
    """
    file = Path(path)
    if not file.is_file():
        raise CapturedFileError(
            "the log does not exist",
            expected="a text file",
            found="no such file",
            where=file,
            next_step="name the file the build printed into",
        )
    data = file.read_bytes()
    if not data.strip():
        raise CapturedFileError(
            "the log is empty",
            expected="what the build or the run printed",
            found=f"{len(data)} bytes",
            where=file,
            next_step="run it again with its output in the file: 2>&1 | tee FILE",
        )
    if b"\0" in data:
        raise CapturedFileError(
            "this is no log",
            expected="text",
            found="a file with zero bytes in it",
            where=file,
            next_step="name the file that the build or the run printed into",
        )
    return read_log_lines(data.decode("utf-8", errors="replace").splitlines())


def read_log_lines(lines: Iterable[str]) -> LogReading:
    """The same for lines that are at hand."""
    lines = list(lines)
    phases = [name for name, pattern in PHASES if any(re.search(pattern, line) for line in lines)]
    release = next((match.group(1) for line in lines if (match := VERSION_LINE.search(line))), None)
    is_complete = LAST_PHASE in phases
    return LogReading(recognise_messages(lines), tuple(phases), release, is_complete, len(lines), find_exception(lines))


def find_exception(lines: Sequence[str]) -> str | None:
    """What the last Python traceback ended with, and on which line, counted from 1."""
    start = max((number for number, line in enumerate(lines) if TRACEBACK in line), default=None)
    if start is None:
        return None
    for number, line in enumerate(lines[start:], start=start + 1):
        if found := EXCEPTION_LINE.search(line):
            return f"{found[1].strip()} (line {number})"
    return None


def recognise_messages(lines: Iterable[str]) -> tuple[RecognisedMessage, ...]:
    """Every catalogue entry found in a log, once each, in order of appearance.

    A line that several entries match belongs to the first in the catalogue: special entries precede general ones.
    """
    found: dict[str, RecognisedMessage] = {}
    for number, line in enumerate(lines, start=1):
        for message in CATALOGUE:
            if re.search(message.pattern, line):
                found.setdefault(message.name, RecognisedMessage(message, line.strip(), number))
                break
    return tuple(found.values())
