"""Why does a port not align? Named faults, tried one by one through the emulator, and ranked by what they explain.

`port_state` holds everything a port is made of; a `fault` changes it; `catalogue` lists the faults; `search` tries them
against an `observation`; `cause` ranks them; `controls` plants one to prove that a gate can fail.
"""

from porting_kit.diagnosis.cause import Diagnosis, name_cause
from porting_kit.diagnosis.controls import GATE_FAULTS, seed_fault
from porting_kit.diagnosis.observation import Observation, observe
from porting_kit.diagnosis.port_state import PortState, describe_port, read_port_state

__all__ = [
    "GATE_FAULTS",
    "Diagnosis",
    "Observation",
    "PortState",
    "describe_port",
    "name_cause",
    "observe",
    "read_port_state",
    "seed_fault",
]
