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
class CompiledKernels:
    """Multi-query kernels that a release ships compiled, for one head size.

    Args:
        head_size: D.
        blocks: blocks of the KV cache in tokens; None is a contiguous cache.
        compute_capabilities: cards, for a cache in the model's own type or int8.
        fp8_kv_compute_capabilities: cards, for an fp8 (e4m3) cache.
    """

    head_size: int
    blocks: tuple[int | None, ...]
    compute_capabilities: tuple[int, ...]
    fp8_kv_compute_capabilities: tuple[int, ...]

    def cards(self, cache_dtype: str) -> tuple[int, ...]:
        """The cards for a type of KV cache."""
        return self.fp8_kv_compute_capabilities if cache_dtype == "fp8" else self.compute_capabilities


@dataclass(frozen=True)
class KernelLimits:
    """What the XQA multi-query kernel of a release takes, and how it says no.

    Args:
        dispatcher_head_sizes: D that the dispatcher lets pass; without a compiled kernel the refusal comes right after.
        tokens_per_block: blocks of the paged cache that the dispatcher lets pass, in tokens.
        compiled: the kernels there are.
        group_power_of_two: H / K must be a power of two.
        multi_block_mode: `ignored`, `refused`, or `switched off` (by the library itself, for speculative decoding).
        kv_scale_applied: the scale of an int8 or fp8 cache reaches the kernel.
        fp8_kv_uses_jit: on compute capability 90 an fp8 cache takes the run-time compiled kernel, which demands rope.
        no_kernel_message: what the library prints when no kernel is left, at the first generation step.
        init_message: what it prints for a type it does not take, when the engine is built.
        source: files and releases these facts were read from.
        inferred: what among them was concluded, not read for every release of the range.
    """

    dispatcher_head_sizes: tuple[int, ...]
    tokens_per_block: tuple[int, ...]
    compiled: tuple[CompiledKernels, ...]
    group_power_of_two: bool
    multi_block_mode: str
    kv_scale_applied: bool
    fp8_kv_uses_jit: bool
    no_kernel_message: str
    init_message: str
    source: str
    inferred: str = ""

    def __post_init__(self) -> None:
        if not {kernels.head_size for kernels in self.compiled} <= set(self.dispatcher_head_sizes):
            raise ValueError("compiled kernels for a head size the dispatcher refuses")
        if self.multi_block_mode not in ("ignored", "refused", "switched off"):
            raise ValueError(f"unknown multi_block_mode {self.multi_block_mode!r}")

    @property
    def blocks(self) -> tuple[int | None, ...]:
        """Every block that some kernel takes and the dispatcher lets pass."""
        known = {block for kernels in self.compiled for block in kernels.blocks}
        allowed = [block for block in self.tokens_per_block if block in known]
        return (*allowed, *([None] if None in known else []))

    def cards(self, cache_dtype: str) -> tuple[int, ...]:
        """Every card that some kernel runs on, for a type of KV cache."""
        return tuple(sorted({card for kernels in self.compiled for card in kernels.cards(cache_dtype)}))


@dataclass(frozen=True)
class PartialFlag:
    """A flag that only some snapshots of a range know: from `since` on, and before `before`.

    A flag that went and came back has one entry for each stay.
    """

    name: str
    since: str | None = None
    before: str | None = None

    def known_to(self, release: Release) -> bool:
        """Whether the release knows the flag."""
        return (self.since is None or parse_release(self.since) <= release) and (
            self.before is None or release < parse_release(self.before)
        )


def words(text: str) -> tuple[str, ...]:
    """A tuple of names from one text, for long lists in data files."""
    return tuple(text.split())


@dataclass(frozen=True)
class BuildFacts:
    """What a release's trtllm-build takes.

    Args:
        medusa_switch: what turns the Medusa mode on: `config` (the checkpoint's own key), `max_draft_len` (that flag),
            or `speculative_decoding_mode` (that flag, from 0.10.0.dev2024050700 on).
        draft_limit_key: the checkpoint key that holds the number of draft tokens.
        plugin_types: the values of --gemm_plugin; no other plugin flag takes more.
        speculative_modes: the values of --speculative_decoding_mode.
        flags: flags every snapshot of the range knows.
        partial: flags only some know.
        complete: False when the list was read from one later version and may lack others.
        source: where it was read.
    """

    medusa_switch: str
    draft_limit_key: str
    plugin_types: tuple[str, ...]
    speculative_modes: tuple[str, ...]
    flags: tuple[str, ...]
    source: str
    partial: tuple[PartialFlag, ...] = ()
    complete: bool = True

    def __post_init__(self) -> None:
        if self.medusa_switch not in ("config", "max_draft_len", "speculative_decoding_mode"):
            raise ValueError(f"unknown medusa_switch {self.medusa_switch!r}")


@dataclass(frozen=True)
class RunFacts:
    """What a release's examples/run.py takes and demands for Medusa.

    Args:
        needs_py_session: Medusa runs only with --use_py_session.
        temperature: the one --temperature it accepts together with --medusa_choices.
        flags: flags every snapshot of the range knows.
        partial: flags only some know.
        complete: False when the list was read from another version.
        source: where it was read.
    """

    needs_py_session: bool
    temperature: str
    flags: tuple[str, ...]
    source: str
    partial: tuple[PartialFlag, ...] = ()
    complete: bool = True


@dataclass(frozen=True)
class ReleaseFacts:
    """All that is known about the releases from `since` up to, not including, `before`."""

    name: str
    since: str
    before: str
    kernel: KernelLimits
    build: BuildFacts
    run: RunFacts
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
