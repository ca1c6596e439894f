"""The negative control of an alignment: plant a fault in the healthy port and see the verdict turn.

A check that cannot fail proves nothing. The control runs the same comparison on the same prompts, on a port that has a
known fault; the verdict must be a failure. It judges the check, not the port.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from porting_kit.alignment.result import AlignmentResult
from porting_kit.alignment.run import align_port_outputs
from porting_kit.diagnosis import PortState, read_port_state, seed_fault
from porting_kit.errors import VerdictFailed
from porting_kit.outcomes import Verdict
from porting_kit.steps.alignment_session import AlignmentSession
from porting_kit.steps.preflight import open_port_tree
from porting_kit.whole_files import write_json

CONTROL_FILE = "control.json"
SMALL_PROMPTS, SMALL_TOKENS = 4, 16
"""A planted fault nearly always shows in so little text; when it does not, the control is given all of it."""


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
    """Align the port with a fault planted in it, in float32: a processor is slow in half precision.

    What came out is kept as `alignment/control.json`, which the next alignment removes.

    Args:
        session: the opened parts of the alignment.
        gate: a gate's name; the most telling of its faults that this port can have is planted.

    Raises:
        PortFileError: this port can have none of the gate's faults.
    """
    fault, state = seed_fault(gate, healthy_state(session))
    model = replace(state, dtype="float32").build()
    wanted = session.options.new_tokens
    found = _align_faulty(session, model, session.prompts[:SMALL_PROMPTS], min(wanted, SMALL_TOKENS))
    if found.verdict is Verdict.PASS:
        found = _align_faulty(session, model, session.prompts, wanted)
    control = ControlResult(fault, found)
    write_json(session.run.folder.alignment / CONTROL_FILE, control.document())
    return control


def _align_faulty(
    session: AlignmentSession, model: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> AlignmentResult:
    options = replace(session.options, new_tokens=new_tokens, batch_sizes=(len(prompts),))
    heads = session.reference_heads
    return align_port_outputs(session.reference, model, prompts, session.tree, heads=heads, options=options)


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
