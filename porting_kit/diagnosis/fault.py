"""What a fault is: a named, small change of a port, with the words that a user needs when it is the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from porting_kit.diagnosis.port_state import PortState

KINDS = ("weights", "config", "kernel", "tree", "runtime", "heads")


@dataclass(frozen=True)
class Fault:
    """One way a port can be wrong.

    Args:
        name: short name, snake case.
        kind: what is wrong: weights, config, kernel, tree, runtime or heads.
        title: the cause in a few words, as a verdict shows it.
        symptom: what the user sees.
        cause: why.
        fix: what to change, exactly: config field, rule, patch or kernel fit.
        releases: which TensorRT-LLM releases can have it.
        source: where it was read or reported.
        apply: healthy port -> port with the fault.
        applies: healthy port -> None, or why this port cannot have the fault.
        needs_release: the fault exists only under these kernels' profile attribute; None for the others.
        decided_by: what an engine user can bring to tell it from its likes.
    """

    name: str
    kind: str
    title: str
    symptom: str
    cause: str
    fix: str
    releases: str
    source: str
    apply: Callable[[PortState], PortState]
    applies: Callable[[PortState], str | None] = lambda state: None
    decided_by: str = "the generation logits (run.py --output_logits_npy, engine built with --gather_generation_logits)"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
