"""Triton, where it is installed: modules of kernels can be imported without it and are of no use then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch
    triton = tl = None
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

HAS_TRITON = triton is not None


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit`; the function itself without Triton."""
    return triton.jit(function) if HAS_TRITON else function
