"""Elementwise operations of TensorRT on torch tensors, and the error for operands that do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from porting_kit.emulator.symbols import find_use_site, raise_not_emulated
from porting_kit.errors import EmulatorError

_BINARY_OPERATIONS = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "GREATER": torch.gt,
    "LESS": torch.lt,
    "EQUAL": torch.eq,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """Small whole powers as products: PyTorch's pow is slow on a CPU."""
    if exponent == 2.0:
        return base * base
    return base * base * base if exponent == 3.0 else torch.pow(base, exponent)


# A float tensor with a number on its right, without making a tensor of the number.
SCALAR_OPERATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "POW": _power,
}


def compute_binary(left: torch.Tensor, right: torch.Tensor, operation: str) -> torch.Tensor:
    """One elementwise operation on torch tensors."""
    function = _BINARY_OPERATIONS.get(operation)
    if function is not None:
        return function(left, right)
    if operation == "DIV":
        is_float = left.dtype.is_floating_point or right.dtype.is_floating_point
        # TensorRT divides integers towards zero.
        return left / right if is_float else torch.div(left, right, rounding_mode="trunc")
    if operation == "FLOOR_DIV":
        return torch.div(left, right, rounding_mode="floor")
    if operation == "POW":
        return _power(left, right.item()) if right.numel() == 1 else torch.pow(left, right)
    raise_not_emulated(f"tensorrt.ElementWiseOperation.{operation}")
    raise AssertionError


def raise_shape_error(operation: str, operands: Sequence[torch.Tensor], error: RuntimeError) -> None:
    """Raise EmulatorError for operands whose shapes do not fit together."""
    inner, outer = find_use_site()
    raise EmulatorError(
        f"the operands of {operation} do not fit together",
        expected="shapes that broadcast, equal types",
        found=", ".join(f"{tuple(operand.shape)} {operand.dtype}" for operand in operands),
        where=inner if not outer else f"{inner}, used by {outer}",
        next_step="TensorRT stops here with a shape error as well",
    ) from error
