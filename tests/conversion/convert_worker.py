"""A conversion in a process of its own, for tests that kill it: base, output folder, ranks, slowness.

Prints "converting" when values begin to be written. `delay` is slept after each span, for a test to hit any moment.
"""

from __future__ import annotations

import os
import sys
import time

from porting_kit.conversion import convert_checkpoint, spans
from porting_kit.conversion.journal import Journal


def main(base: str, out: str, tp_size: str, delay: str, span_bytes: str) -> None:
    spans.SPAN_BYTES = int(span_bytes)
    note = Journal.note
    started = False

    def slow_note(self: Journal, number: int, num_bytes: int) -> None:
        nonlocal started
        note(self, number, num_bytes)
        self.flush()
        if not started:
            print("converting", os.getpid(), flush=True)
            started = True
        time.sleep(float(delay))

    Journal.note = slow_note
    convert_checkpoint(base, out, dtype="float16", tp_size=int(tp_size), workers=2, verify=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
