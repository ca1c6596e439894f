"""The faults that a port can have, as data, one module for each part of a port. Adding one is one entry.

Numbers of releases and file names are TensorRT-LLM's. An entry says what a user sees, why, and the exact fix.
"""

from porting_kit.diagnosis.catalogue.code import CODE_FAULTS
from porting_kit.diagnosis.catalogue.comparison import COMPARISON_FAULTS
from porting_kit.diagnosis.catalogue.config import CONFIG_FAULTS
from porting_kit.diagnosis.catalogue.heads import HEAD_FAULTS
from porting_kit.diagnosis.catalogue.kernel import KERNEL_FAULTS
from porting_kit.diagnosis.catalogue.runtime import RUNTIME_FAULTS
from porting_kit.diagnosis.catalogue.tree import TREE_FAULTS
from porting_kit.diagnosis.catalogue.weights import WEIGHT_FAULTS
from porting_kit.diagnosis.fault import Fault
from porting_kit.errors import PortFileError, suggest_nearest

__all__ = ["CATALOGUE", "NAMES", "find_fault"]

CATALOGUE: tuple[Fault, ...] = (
    *KERNEL_FAULTS,
    *WEIGHT_FAULTS,
    *CONFIG_FAULTS,
    *CODE_FAULTS,
    *TREE_FAULTS,
    *RUNTIME_FAULTS,
    *HEAD_FAULTS,
    *COMPARISON_FAULTS,
)

NAMES = {fault.name: fault for fault in CATALOGUE}


def find_fault(name: str) -> Fault:
    """The entry of this name.

    Raises:
        PortFileError: there is none; with the nearest name.
    """
    if name in NAMES:
        return NAMES[name]
    nearest = suggest_nearest(name, list(NAMES))
    raise PortFileError(
        f"No fault has the name {name!r}",
        expected=", ".join(NAMES),
        found=repr(name),
        next_step=f"Did you mean {nearest!r}?" if nearest else "Name one of them.",
    )
