"""What a kernel gate is: one demand of the generation phase with speculative decoding, as data.

In this phase there is one kernel family (XQA with several query tokens) and no fallback: what it refuses stops the
engine at its first generation step, and what it does not look at is computed without (silent). Each gate says what it
looks at, in which releases, what the library prints, what follows, what mends it, and where that was read. The gates
themselves are in `enforced_gates` and `silent_gates`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from porting_kit.releases.facts import KernelLimits
from porting_kit.releases.shape import AttentionShape

ENFORCED = "enforced"
SILENT = "silent"
STAGES = ("build", "generation")

Test = Callable[[AttentionShape, KernelLimits], bool]


@dataclass(frozen=True)
class KernelGate:
    """One demand of the kernels.

    Args:
        name: what is looked at; the key of preflight's table.
        kind: `enforced` (the library stops) or `silent` (it runs and the result is wrong).
        applies: whether a release has this gate at all.
        holds: whether a shape passes it.
        value: what the shape has, for the table.
        demand: what the release wants, for the table and the message.
        message: what the library prints, None for a silent gate.
        stage: `build` when the plugin refuses at build time, `generation` at the first generation step.
        effect: what the user sees.
        remedy: what to do about it.
        mended_by: kernel-fit transforms (or `patch_positions`) that mend it, best first.
        mendable: whether they can mend it for this shape.
        source: where it was read.
    """

    name: str
    kind: str
    applies: Callable[[KernelLimits], bool]
    holds: Test
    value: Callable[[AttentionShape], object]
    demand: Callable[[KernelLimits], str]
    message: Callable[[KernelLimits], str | None]
    stage: str
    effect: str
    remedy: Callable[[AttentionShape, KernelLimits], str]
    mended_by: tuple[str, ...]
    mendable: Test
    source: str

    def __post_init__(self) -> None:
        if self.kind not in (ENFORCED, SILENT):
            raise ValueError(f"gate {self.name}: unknown kind {self.kind!r}")
        if self.stage not in STAGES:
            raise ValueError(f"gate {self.name}: unknown stage {self.stage!r}")

    def mends(self, shape: AttentionShape, limits: KernelLimits) -> tuple[str, ...]:
        """The transforms that mend the gate for this shape; empty when none can."""
        return self.mended_by if self.mendable(shape, limits) else ()


def _always(*_: object) -> bool:
    return True


def _no_kernel(limits: KernelLimits) -> str:
    return limits.no_kernel_message


def enforced_gate(
    name: str,
    *,
    holds: Test,
    value: Callable[[AttentionShape], object],
    demand: Callable[[KernelLimits], str],
    remedy: str | Callable[[AttentionShape, KernelLimits], str],
    source: str,
    applies: Callable[[KernelLimits], bool] = _always,
    message: Callable[[KernelLimits], str | None] = _no_kernel,
    stage: str = "generation",
    mended_by: tuple[str, ...] = (),
    mendable: Test = _always,
) -> KernelGate:
    """A gate at which the library stops."""
    effect = "the engine cannot be built" if stage == "build" else "the engine builds, and stops at its first step"
    spoken = remedy if callable(remedy) else lambda shape, limits: remedy
    return KernelGate(
        name, ENFORCED, applies, holds, value, demand, message, stage, effect, spoken, mended_by, mendable, source
    )  # fmt: skip


def silent_gate(
    name: str,
    *,
    holds: Test,
    value: Callable[[AttentionShape], object],
    demand: str,
    effect: str,
    remedy: str,
    source: str,
    applies: Callable[[KernelLimits], bool] = _always,
    mended_by: tuple[str, ...] = (),
) -> KernelGate:
    """A gate that nobody watches: the library runs, and the result is wrong."""
    return KernelGate(
        name,
        SILENT,
        applies,
        holds,
        value,
        lambda limits: demand,
        lambda limits: None,
        "generation",
        effect,
        lambda shape, limits: remedy,
        mended_by,
        _always,
        source,
    )
