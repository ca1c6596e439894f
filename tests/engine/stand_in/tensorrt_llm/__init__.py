"""A stand-in for TensorRT-LLM's runtime: the signatures of one release, recorded from its sources, over the emulator.

STAND_IN_RELEASE names the release, STAND_IN_FAULT a fault of the engine or its runtime.
"""

from . import signatures

__version__ = signatures.RELEASE


def mpi_rank() -> int:
    return 0


if signatures.offers("LLM") and not signatures.is_late():
    from .llm import LLM  # noqa: F401
