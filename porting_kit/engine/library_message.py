"""One message of the library, and what it means."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LibraryMessage:
    """One message and its meaning.

    Args:
        name: a short name.
        pattern: regular expression searched in each log line.
        cause: what is behind it.
        next_step: what to do.
        source: where the library says it.
        literals: how it stands in the library's own sources, as far as no value is put in; any of them in one release.
            Empty for messages of Python, CUDA or TensorRT.
        fatal: False for a warning that matters.
    """

    name: str
    pattern: str
    cause: str
    next_step: str
    source: str
    literals: tuple[str, ...] = ()
    fatal: bool = True

    def __post_init__(self) -> None:
        re.compile(self.pattern)
