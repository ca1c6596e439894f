"""The negative control of an alignment: plant a fault in the healthy port and see the verdict turn.

A check that cannot fail proves nothing. The control runs the same comparison on the same prompts, on a port that has a
known fault; the verdict must be a failure. It judges the check, not the port.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from porting_kit.alignment.result import AlignmentResult
from porting_kit.alignment.run import align_port_outputs
from porting_kit.diagnosis import PortState, read_port_state, seed_fault
from porting_kit.errors import VerdictFailed
from porting_kit.outcomes import Verdict
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.preflight import open_port_tree

CONTROL_TOKENS = 32
"""Tokens per prompt: enough for every fault of the catalogue to show, whatever the port asks for."""


@dataclass(frozen=True)
class ControlResult:
    """What the check said about a port with a fault in it.

    Args:
        fault: the fault that was planted.
        alignment: the comparison's result.
    """

    fault: str
    alignment: AlignmentResult

    @property
    def has_turned(self) -> bool:
        """Whether the comparison failed, as it must."""
        return self.alignment.verdict is Verdict.FAIL

    def document(self) -> dict[str, Any]:
        """JSON-ready, with the alignment's keys."""
        return {**self.alignment.as_dict(), "fault": self.fault, "has_turned": self.has_turned}


def run_control(session: AlignmentSession, gate: str = "tokens") -> ControlResult:
    """Align the port with a fault planted in it.

    Args:
        session: the opened parts of the alignment.
        gate: a gate's name; the most telling of its faults that this port can have is planted.

    Raises:
        PortFileError: this port can have none of the gate's faults.
    """
    fault, state = seed_fault(gate, healthy_state(session))
    new_tokens = min(session.options.new_tokens, CONTROL_TOKENS)
    options = replace(session.options, new_tokens=new_tokens, batch_sizes=(len(session.prompts),))
    alignment = align_port_outputs(
        session.reference,
        state.build(),
        session.prompts,
        session.tree,
        heads=session.reference_heads,
        options=options,
    )
    return ControlResult(fault, alignment)


def healthy_state(session: AlignmentSession) -> PortState:
    """The port as it was converted and patched, on exact kernels."""
    folder = session.run.folder
    patch = folder.outcome("patch")
    module = next(product for product in patch.products if product.endswith(".py"))
    return read_port_state(
        open_port_tree(session.run.port),
        folder.checkpoint,
        tree=session.tree,
        module_file=folder.root / module,
        class_name=patch.figures["class_name"],
    )


def require_turned(control: ControlResult) -> str:
    """The control's own gate. Returns the sentence to show.

    Raises:
        VerdictFailed: the comparison passed in spite of the fault.
    """
    if not control.has_turned:
        raise VerdictFailed(
            f"the alignment passes in spite of the planted fault {control.fault!r}",
            expected="a failure",
            found=control.alignment.summary,
            next_step="do not rely on this alignment: use more or longer prompts (alignment.prompts, new_tokens)",
        )
    return f"With the fault {control.fault!r} planted, the gate {control.alignment.failing_gate!r} fails, as it must."
