"""A command for one release: its flags, the reason for each, and the text a person can run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlannedFlag:
    """One flag of a command: its name without dashes, its value (None for a switch), and why it is there."""

    name: str
    value: str | None
    reason: str

    @property
    def arguments(self) -> list[str]:
        """The flag as it stands on the command line."""
        return [f"--{self.name}"] if self.value is None else [f"--{self.name}", self.value]


@dataclass(frozen=True)
class CommandPlan:
    """A command for one release.

    Args:
        program: the words before the flags.
        release: the release it is for.
        flags: in order.
        checked_against: what the flags were checked against.
        remarks: what the user should know, one sentence each.
    """

    program: tuple[str, ...]
    release: str
    flags: tuple[PlannedFlag, ...]
    checked_against: str
    remarks: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The flags as they stand on the command line."""
        return [word for flag in self.flags for word in flag.arguments]

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command, for subprocess."""
        return (*self.program, *self.arguments)

    @property
    def shell(self) -> str:
        """The command as text for a POSIX shell, one flag a line, headed by the release it is for."""
        lines = [shlex.join(self.program), *(f"    {shlex.join(flag.arguments)}" for flag in self.flags)]
        return f"# for TensorRT-LLM {self.release}\n" + " \\\n".join(lines) + "\n"

    def value(self, name: str) -> str | None:
        """The value of a planned flag, None when it is a switch or not planned."""
        return next((flag.value for flag in self.flags if flag.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "release": self.release,
            "command": list(self.command),
            "flags": [vars(flag) for flag in self.flags],
            "checked_against": self.checked_against,
            "remarks": list(self.remarks),
        }
