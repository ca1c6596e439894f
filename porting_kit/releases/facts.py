"""The shape of what is known about one release range, and the look-up from a release number to its range.

Every range is one module of `porting_kit.releases.data` that defines `FACTS`. Ranges are contiguous: a gap or an
overlap is an error when the table is read.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import dataclass
from functools import lru_cache

from porting_kit.errors import PortFileError
from porting_kit.releases.version import Release, parse_release


@dataclass(frozen=True)
class KernelLimits:
    """What the XQA multi-query kernel of a release takes, and how it says no.

    Args:
        head_sizes: D that the dispatcher lets pass.
        kernel_head_sizes: D for which a compiled multi-query kernel exists; a D only in `head_sizes` is refused later.
        tokens_per_block: accepted blocks of the paged cache, in tokens.
        compute_capabilities: cards with compiled multi-query kernels.
        fp8_kv_compute_capabilities: the same for an fp8 (e4m3) cache.
        group_power_of_two: H / K must be a power of two.
        multi_block_mode: `ignored`, `refused`, or `switched off` (by the library itself, for speculative decoding).
        kv_scale_applied: the scale of an int8 or fp8 cache reaches the kernel.
        fp8_kv_uses_jit: on compute capability 90 an fp8 cache takes the run-time compiled kernel, which demands rope.
        no_kernel_message: what the library prints when no kernel is left, at the first generation step.
        init_message: what it prints for a type it does not take, when the engine is built.
        source: files and releases these facts were read from.
        inferred: statements among them that were concluded, not read for every release of the range.
    """

    head_sizes: tuple[int, ...]
    kernel_head_sizes: tuple[int, ...]
    tokens_per_block: tuple[int, ...]
    compute_capabilities: tuple[int, ...]
    fp8_kv_compute_capabilities: tuple[int, ...]
    group_power_of_two: bool
    multi_block_mode: str
    kv_scale_applied: bool
    fp8_kv_uses_jit: bool
    no_kernel_message: str
    init_message: str
    source: str
    inferred: str = ""

    def __post_init__(self) -> None:
        if not set(self.kernel_head_sizes) <= set(self.head_sizes):
            raise ValueError(f"kernels for head sizes the dispatcher refuses: {self.kernel_head_sizes}")
        if self.multi_block_mode not in ("ignored", "refused", "switched off"):
            raise ValueError(f"unknown multi_block_mode {self.multi_block_mode!r}")


@dataclass(frozen=True)
class ReleaseFacts:
    """All that is known about the releases from `since` up to, not including, `before`."""

    name: str
    since: str
    before: str
    kernel: KernelLimits
    position_kinds: tuple[str, ...]
    rope_scaling_kinds: tuple[str, ...]

    def contains(self, release: Release) -> bool:
        """Whether the release lies in this range."""
        return parse_release(self.since) <= release < parse_release(self.before)


@lru_cache(maxsize=1)
def load_release_ranges() -> tuple[ReleaseFacts, ...]:
    """Every range of `data/`, oldest first.

    Raises:
        ValueError: two ranges overlap or leave a gap.
    """
    from porting_kit.releases import data

    names = sorted(module.name for module in pkgutil.iter_modules(data.__path__))
    ranges = [importlib.import_module(f"{data.__name__}.{name}").FACTS for name in names]
    ranges.sort(key=lambda facts: parse_release(facts.since))
    for earlier, later in itertools.pairwise(ranges):
        if earlier.before != later.since:
            raise ValueError(f"release ranges {earlier.name} and {later.name} do not meet: {earlier.before}")
    return tuple(ranges)


def describe_known_range() -> str:
    """`0.8 to 1.2` in words, for messages."""
    ranges = load_release_ranges()
    return f"{ranges[0].name} to {ranges[-1].name}"


@lru_cache(maxsize=64)
def find_release_facts(release: str) -> ReleaseFacts:
    """The facts of the range a release lies in.

    Raises:
        PortFileError: no release number, or a release outside the known ranges.
    """
    parsed = parse_release(release)
    for facts in load_release_ranges():
        if facts.contains(parsed):
            return facts
    too_new = parsed >= parse_release(load_release_ranges()[-1].before)
    raise PortFileError(
        f"TensorRT-LLM {release} is outside the known releases",
        expected=f"{describe_known_range()}, the releases that have Medusa in the TensorRT backend",
        found=release,
        next_step=(
            "use 1.2.x, the last release line with the TensorRT backend"
            if too_new
            else "use 0.8 or later, the first release with Medusa"
        ),
    )
