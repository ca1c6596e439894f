"""Where the LLM of the TensorRT backend stands from 1.0 on."""

from . import signatures

if not signatures.is_late():
    raise ImportError("no such module before 1.0")

from .llm import LLM  # noqa: F401
