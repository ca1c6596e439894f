"""The errors a user can meet: one base class, named kinds, messages in one fixed order.

Message order: subject, expected, found, where, next step. A long list shows ten items and a count.
This module does not know what any step does; it only words what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

LISTED_ITEMS = 10


class PortingKitError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        subject: what went wrong, one clause ("port file has an unknown key 'tp_sise'").
        expected: what would have been right.
        found: what was there instead.
        where: file, tensor, class or line.
        next_step: what the user can do now.
        items: a list of offenders; at most ten are printed, then the count.
    """

    exit_code = 2

    def __init__(
        self,
        subject: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        next_step: str | None = None,
        items: Iterable[object] = (),
    ) -> None:
        self.subject = subject
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.where = None if where is None else str(where)
        self.next_step = next_step
        self.items = tuple(str(item) for item in items)
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The whole message, one labelled line a field."""
        lines = [self.subject]
        labelled = (("expected", self.expected), ("found", self.found), ("where", self.where))
        lines += [f"  {label}: {value}" for label, value in labelled if value is not None]
        if self.items:
            lines.append(f"  {format_items(self.items)}")
        if self.next_step is not None:
            lines.append(f"  next step: {self.next_step}")
        return "\n".join(lines)

    def at(self, where: object) -> PortingKitError:
        """The same error with its place, for whoever knows it; one that has a place keeps it."""
        return self._placed(self.where or where)

    def moved(self, temporary: object, final: object) -> PortingKitError:
        """The same error with the final name of a place whose temporary one is gone."""
        return self._placed(self.where and self.where.replace(str(temporary), str(final)))

    def _placed(self, where: object) -> PortingKitError:
        fields = {"expected": self.expected, "found": self.found, "next_step": self.next_step, "items": self.items}
        return type(self)(self.subject, where=where, **fields)

    def as_dict(self) -> dict[str, object]:
        """The fields for `--json` output."""
        return {
            "kind": type(self).__name__,
            "subject": self.subject,
            "expected": self.expected,
            "found": self.found,
            "where": self.where,
            "items": list(self.items),
            "next_step": self.next_step,
        }


@contextmanager
def placed(where: object) -> Iterator[None]:
    """Errors inside that name no place get this one."""
    try:
        yield
    except PortingKitError as error:
        raise error.at(where) from error


class PortFileError(PortingKitError):
    """The port file, or a value that overrides one of its fields, cannot be used."""


class RunFolderError(PortingKitError):
    """A run folder is occupied, incomplete, or holds results of other inputs."""


class SourceTreeError(PortingKitError):
    """A TensorRT-LLM source tree is missing, unknown, or lacks what was asked of it."""


class PatchError(PortingKitError):
    """A model.py cannot be patched: an anchor is missing, doubled, or of an unknown shape."""


class BaseModelError(PortingKitError):
    """The base model's folder, config or weights cannot be used."""


class HeadsError(PortingKitError):
    """The Medusa heads cannot be used: layout, count, shapes or values."""


class TreeError(PortingKitError):
    """The Medusa choices do not form a usable tree."""


class ConversionError(PortingKitError):
    """Tensors and rules do not account for each other, or a value does not survive the conversion."""


class CheckpointError(PortingKitError):
    """A TensorRT-LLM checkpoint is incomplete or contradicts its own config."""


class EmulatorError(PortingKitError):
    """The emulator met something it does not emulate, or input the library would not accept."""


class CapturedFileError(PortingKitError):
    """Files brought back from an engine do not belong to this port, or are not in a known format."""


class KernelRefusal(PortingKitError):
    """The release's kernels refuse this model: the engine would stop with this message."""

    exit_code = 1


class VerdictFailed(PortingKitError):
    """A notebook's gate: the step ran, and its verdict is fail."""

    exit_code = 1


class EnvironmentMissing(PortingKitError):
    """The machine lacks what the step needs: a GPU, tensorrt_llm, an optional extra."""

    exit_code = 3


def format_items(items: Iterable[object], limit: int = LISTED_ITEMS) -> str:
    """List at most `limit` items, then say how many there are."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown} ... ({len(texts)} in all)"


def format_count(count: int, noun: str) -> str:
    """A count with its noun, whose plural ends in s: "1 path", "2 paths"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def suggest_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to a misspelt one, or None when nothing is near."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
