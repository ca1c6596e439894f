"""What a fault is: a named, small change of a port, with the words that a user needs when it is the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from porting_kit.diagnosis.port_state import PortState

KINDS = ("weights", "config", "code", "kernel", "tree", "runtime", "heads", "comparison")

EVERY, GENERATION, DRAFTS, READING = "every", "generation", "drafts", "reading"
PHASES = (EVERY, GENERATION, DRAFTS, READING)
"""Where a fault shows: in every phase; after the first token only; in the drafts only, so that the text stays right; or
in how the run was made or read, with a port that is right."""

EVERY_RELEASE = "0.8 to 1.2"
"""The releases of the TensorRT backend with Medusa, where each of them can have a fault."""

LOGITS_FILE = "the generation logits (run.py --output_logits_npy, engine built with --gather_generation_logits)"
STEPS_FILE = "the accepted length of every step (accept_lengths of the Python session)"


@dataclass(frozen=True)
class Fault:
    """One way a port can be wrong.

    Args:
        name: short name, snake case.
        kind: what is wrong: one of `KINDS`.
        title: the cause in a few words, as a verdict shows it.
        symptom: what the user sees.
        cause: why.
        fix: what to change, exactly: config field, rule, patch or kernel fit.
        releases: which TensorRT-LLM releases can have it.
        source: where it was read or reported.
        apply: healthy port -> port with the fault.
        applies: healthy port -> None, or why this port cannot have the fault.
        phase: one of `PHASES`; it decides how many passes a hypothesis costs.
        variants: other forms of the same fault, tried as well.
        reread: (port, observation) -> the observation as it looks when this fault is assumed; None leaves it.
        rescore: (port, logits [n, V], prompt, tokens) -> the logits that chose; None takes them as they are.
        rescores: other forms of it.
        rereads: other forms of `reread`.
        estimates: (logits [n, V] per prompt, observation) -> `choice_faults.Estimate`, a rescore whose value is read
            off the observation; None where the observation asks for none.
        accepts_fewer: it says no more of a step than that it accepts fewer drafts than the healthy port.
        follows_length: a step computes what its length so far asks for, so that one pass over the whole text is another
            computation: it is replayed.
        is_broad: it would explain much that is something else, so it is named only when no other fault fits.
    """

    name: str
    kind: str
    title: str
    symptom: str
    cause: str
    fix: str
    releases: str
    source: str
    apply: Callable[[PortState], PortState] = lambda state: state
    applies: Callable[[PortState], str | None] = lambda state: None
    phase: str = EVERY
    variants: tuple[Callable[[PortState], PortState], ...] = ()
    reread: Callable[[PortState, Any], Any] | None = None
    rescore: Callable[[PortState, Any, Any, Any], Any] | None = None
    rescores: tuple[Callable[[PortState, Any, Any, Any], Any], ...] = ()
    rereads: tuple[Callable[[PortState, Any], Any], ...] = ()
    estimates: tuple[Callable[[Any, Any], Any], ...] = ()
    accepts_fewer: bool = False
    follows_length: bool = False
    is_broad: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.phase not in PHASES:
            raise ValueError(f"fault {self.name!r}: phase {self.phase!r} is not one of {', '.join(PHASES)}")

    @property
    def is_choice(self) -> bool:
        """It says how tokens were chosen, from logits that are the port's own."""
        return self.rescore is not None or bool(self.estimates)

    @property
    def forms(self) -> tuple[Callable[[PortState], PortState], ...]:
        """Every form of the fault, the usual one first."""
        return (self.apply, *self.variants)
