"""Release numbers of TensorRT-LLM and their order: development snapshots before the release they lead to.

Own words instead of the `packaging` library because importing that costs more than everything else in this package
together, and preflight has one second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from porting_kit.errors import PortFileError

_PATTERN = re.compile(
    r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:(a|b|rc)(\d+))?(?:\.?post(\d+))?(?:\.?dev(\d+))?(?:\+[a-z0-9.]+)?", re.ASCII
)
_STAGES = {"a": 1, "b": 2, "rc": 3}
_FINAL = 4


@dataclass(frozen=True, order=True)
class Release:
    """One release number, ordered as Python packaging orders them.

    `0.11.0.dev2024062500` comes before `0.11.0rc1`, which comes before `0.11.0`, which comes before `0.11.0.post1`.
    """

    key: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def parse_release(text: str) -> Release:
    """Read a release number such as `0.11.0.dev2024062500`, `v0.9.0` or `1.1.0rc2`.

    Raises:
        PortFileError: the text is no release number.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise PortFileError(
            "not a TensorRT-LLM release number",
            expected="a number such as 0.11.0.dev2024062500, 0.12.0 or 1.2.1",
            found=repr(text),
            next_step="set trtllm.release, or kernel: release:<number>, to the release you will build with",
        )
    major, minor, micro, stage, stage_number, post, dev = match.groups()
    if stage is None and post is None and dev is not None:
        phase = (0, 0)  # a .dev snapshot of the release itself precedes its alphas
    else:
        phase = (_STAGES.get(stage or "", _FINAL), int(stage_number or 0))
    dev_key = (0, int(dev)) if dev is not None else (1, 0)
    key = (int(major), int(minor), int(micro or 0), *phase, int(post or -1), *dev_key)
    return Release(key, text)
