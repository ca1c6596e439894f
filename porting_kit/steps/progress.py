"""A progress line with bytes per second and time left, on stderr: a terminal and a notebook show the same text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from porting_kit.conversion.stream import Progress

SHOWN_AFTER_SECONDS = 1.0
"""Shorter work shows nothing: a line that flashes up helps nobody, and stays in saved notebooks."""
SECONDS_BETWEEN_LINES = {True: 0.2, False: 5.0}
"""Where the line can be drawn over itself, and where each state is a new line of a log."""


class ProgressBar:
    """Shows the `Progress` of a conversion until the context is left.

    Args:
        word: what is going on.
        stream: where to; stderr when None.
    """

    def __init__(self, word: str, stream: Any = None) -> None:
        self.word, self.stream, self._bar = word, stream or sys.stderr, None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """One line before the work begins."""
        print(f"{self.word}: {text}", file=self.stream)

    def show(self, progress: Progress) -> None:
        """Draw the state; nothing in the first second."""
        from tqdm import tqdm

        if self._bar is None:
            if progress.seconds < SHOWN_AFTER_SECONDS:
                return
            can_redraw = self.stream.isatty() or "ipykernel" in sys.modules
            self._bar = tqdm(
                desc=self.word,
                total=progress.total_bytes,
                initial=progress.resumed_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=self.stream,
                mininterval=SECONDS_BETWEEN_LINES[can_redraw],
                dynamic_ncols=self.stream.isatty(),
            )
            self._bar.start_t -= progress.seconds  # the rate counts from the start of the conversion
        self._bar.update(progress.done_bytes - self._bar.n)
