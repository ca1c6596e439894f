"""Which attention arithmetic a release has in the generation phase, and what it refuses.

`kernel_profile("exact")` is the mathematics; `kernel_profile("release:0.11.0.dev2024062500")` is what that release's
kernels do: it refuses what they refuse, with their message, and leaves out what they leave out. `kernel_profile("xqa")`
is for the real kernel: what surrounds it is as in every release, and the arithmetic is handed in from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from porting_kit.errors import KernelRefusal, PortFileError
from porting_kit.releases.enforced_gates import ENFORCED_GATES
from porting_kit.releases.facts import KernelLimits, ReleaseFacts, describe_known_range, find_release_facts
from porting_kit.releases.gate import ENFORCED, KernelGate
from porting_kit.releases.shape import AttentionShape
from porting_kit.releases.silent_gates import SILENT_GATES

__all__ = ["AttentionShape", "GateResult", "KernelGate", "KernelProfile", "evaluate_gates", "kernel_profile"]


@dataclass(frozen=True)
class GateResult:
    """One row of preflight's table.

    Args:
        name: the gate.
        value: what the model (or the machine) has.
        verdict: `pass`, `refused` (it stops), `silent` (it runs and is wrong) or `mended` (a transform removes it).
        expected: what the gate wants.
        message: what the library would print, None when it prints nothing or the gate passes.
        effect: what the user would see, None when the gate passes.
        remedy: what to do, None when the gate passes.
        mended_by: transforms that mend it, best first.
        source: where the gate was read.
    """

    name: str
    value: str
    verdict: str
    expected: str = ""
    message: str | None = None
    effect: str | None = None
    remedy: str | None = None
    mended_by: tuple[str, ...] = ()
    source: str = ""

    def as_dict(self) -> dict[str, object]:
        """A JSON-ready dict."""
        return {**vars(self), "mended_by": list(self.mended_by)}


@dataclass(frozen=True)
class KernelProfile:
    """The generation-phase arithmetic of one release, or the exact one.

    Args:
        name: `exact`, `xqa` or `release:<number>`.
        release: the release number, None for `exact` and `xqa`.
        alibi_in_generation: ALiBi reaches the generation phase with speculative decoding.
        softcap_in_generation: so does a tanh soft-cap on the attention logits.
        relative_bias_in_generation: so does a learned relative bias.
        kv_scale_in_generation: so does the scale of an int8 or fp8 cache.
        window_in_generation: a sliding window is honoured beyond its length.
        one_position_id_per_request: the runtime feeds one position id per request, not one per tree node.
        gates: the gates this release has, in the library's order.
        limits: their parameters, None for `exact` and `xqa`.
        attend_tree: the real kernel, called in every tree step; None where its arithmetic is imitated.
    """

    name: str
    release: str | None
    alibi_in_generation: bool
    softcap_in_generation: bool
    relative_bias_in_generation: bool
    kv_scale_in_generation: bool
    window_in_generation: bool
    one_position_id_per_request: bool
    gates: tuple[KernelGate, ...] = ()
    limits: KernelLimits | None = None
    attend_tree: Callable[..., Any] | None = None

    def refuse(self, shape: AttentionShape) -> None:
        """Stop where the library would stop, with its message.

        Raises:
            KernelRefusal: the first enforced gate that the shape does not pass.
        """
        for gate in self.gates:
            if gate.kind == ENFORCED and not gate.holds(shape, self.limits):
                raise KernelRefusal(
                    gate.message(self.limits),
                    expected=f"{gate.name}: {gate.demand(self.limits)}",
                    found=gate.value(shape),
                    where=f"TensorRT-LLM {self.release}, {gate.stage}",
                    next_step=gate.remedy(shape, self.limits),
                )


_EXACT = KernelProfile(
    name="exact",
    release=None,
    alibi_in_generation=True,
    softcap_in_generation=True,
    relative_bias_in_generation=True,
    kv_scale_in_generation=True,
    window_in_generation=True,
    one_position_id_per_request=False,
)

# Its dispatch is not judged (no gates): only what the kernel and the runtime around it compute.
_XQA = KernelProfile(
    name="xqa",
    release=None,
    alibi_in_generation=False,
    softcap_in_generation=False,
    relative_bias_in_generation=False,
    kv_scale_in_generation=True,
    window_in_generation=False,
    one_position_id_per_request=True,
)


def kernel_profile(name: str) -> KernelProfile:
    """The profile of a port file's `kernel` entry.

    Args:
        name: `exact`, `xqa` (without the kernel itself, which its user puts in), or `release:` and a TensorRT-LLM
            release number.

    Raises:
        PortFileError: neither form, no release number, or a release outside the known ranges.
    """
    if name in (_EXACT.name, _XQA.name):
        return _EXACT if name == _EXACT.name else _XQA
    prefix, separator, release = name.partition(":")
    if prefix != "release" or not separator:
        raise PortFileError(
            "unknown kernel profile",
            expected=f"exact, xqa, or release:<number> with a release of {describe_known_range()}",
            found=repr(name),
            next_step="for example kernel: release:0.11.0.dev2024062500",
        )
    return _release_profile(release, find_release_facts(release))


def _release_profile(release: str, facts: ReleaseFacts) -> KernelProfile:
    return KernelProfile(
        name=f"release:{release}",
        release=release,
        alibi_in_generation=False,
        softcap_in_generation=False,
        relative_bias_in_generation=False,
        kv_scale_in_generation=facts.kernel.kv_scale_applied,
        window_in_generation=False,
        one_position_id_per_request=True,
        gates=tuple(gate for gate in (*ENFORCED_GATES, *SILENT_GATES) if gate.applies(facts.kernel)),
        limits=facts.kernel,
    )


def evaluate_gates(
    shape: AttentionShape, profile: KernelProfile, *, fitted: AttentionShape | None = None
) -> tuple[GateResult, ...]:
    """Every gate of a profile on a shape.

    Args:
        shape: the model as it is.
        profile: the target release; `exact` has no gates.
        fitted: the model after kernel fit and patching; a gate that only the fitted shape passes is `mended`, a gate
            that the fitted shape fails is judged on the fitted shape.
    """
    return tuple(_evaluate(gate, shape, profile.limits, fitted or shape) for gate in profile.gates)


def _evaluate(gate: KernelGate, shape: AttentionShape, limits: KernelLimits, fitted: AttentionShape) -> GateResult:
    value, expected = str(gate.value(shape)), gate.demand(limits)
    if str(gate.value(fitted)) != value:
        value = f"{value} -> {gate.value(fitted)}"
    fits = gate.holds(fitted, limits)
    if fits and gate.holds(shape, limits):
        return GateResult(gate.name, value, "pass", expected, source=gate.source)
    verdict = "mended" if fits else ("refused" if gate.kind == ENFORCED else "silent")
    return GateResult(
        gate.name,
        value,
        verdict,
        expected,
        message=gate.message(limits),
        effect=gate.effect,
        remedy=gate.remedy(shape, limits),
        mended_by=gate.mends(shape, limits),
        source=gate.source,
    )
