"""Half-precision products on a CPU: computed in float32 from the half values, rounded once at the end.

That is what a GPU's tensor cores do, and on CPUs without half arithmetic it is several times faster than PyTorch's own
half products. Weights are kept in float32 beside their half form while they fit a budget, and converted each time
beyond it.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn import functional

HALF_TYPES = (torch.float16, torch.bfloat16)
BUDGET_BYTES = 2 << 30
"""Float32 copies of weights kept at a time, over all models of the process."""

_kept_bytes = 0


def is_slow(tensor: torch.Tensor) -> bool:
    """Whether products of this tensor take the detour."""
    return tensor.device.type == "cpu" and tensor.dtype in HALF_TYPES


def linear_rounded(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input @ weight.T in the type of the input: [..., in] and [out, in] to [..., out]."""
    if not is_slow(input):
        return functional.linear(input, weight)
    return functional.linear(input.float(), _as_float(weight)).to(input.dtype)


def matmul_rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in the type of the left."""
    if not is_slow(left):
        return left @ right
    return (left.float() @ right.float()).to(left.dtype)


def _as_float(weight: torch.Tensor) -> torch.Tensor:
    """The weight in float32, kept on the tensor itself so that it goes when the weight goes."""
    global _kept_bytes
    if weight.is_inference():  # has no version, so a copy could go stale unnoticed
        return weight.float()
    version, kept = getattr(weight, "kept_float", (None, None))
    # A weight that was changed in place since (a fault being tried) has another version.
    if version == weight._version:
        return kept
    converted = weight.float()
    size = converted.numel() * converted.element_size()
    if kept is not None:
        weight.kept_float = (weight._version, converted)
    elif _kept_bytes + size <= BUDGET_BYTES:
        weight.kept_float = (weight._version, converted)
        _kept_bytes += size
        weakref.finalize(weight, _release, size)
    return converted


def _release(size: int) -> None:
    global _kept_bytes
    _kept_bytes -= size
