"""The primitive operations of tensorrt_llm.functional, computed in eager PyTorch.

`PRIMITIVES` maps the function's name in functional.py to its replacement; signatures accept what any release passes.
Composites of functional.py (its GELU, its RMS norm, its rotary and ALiBi tables) are not here: they run as written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional

from porting_kit.emulator.arithmetic import raise_shape_error
from porting_kit.emulator.half_precision import linear_rounded, matmul_rounded
from porting_kit.emulator.layout import LAYOUT_PRIMITIVES
from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor, binary, cast


def elementwise_binary(left: Any, right: Any, op: str) -> Tensor:
    return binary(left, right, op)


_UNARY_OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ROUND": torch.round,
    "SQRT": torch.sqrt,
    "EXP": torch.exp,
    "SIN": torch.sin,
    "COS": torch.cos,
    "ABS": torch.abs,
    "LOG": torch.log,
    "NOT": torch.logical_not,
    "NEG": torch.neg,
    "FLOOR": torch.floor,
    "CEIL": torch.ceil,
    "ERF": torch.erf,
}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "RELU": torch.relu,
    "TANH": torch.tanh,
    "SIGMOID": torch.sigmoid,
}
_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MAX": torch.amax,
    "MIN": torch.amin,
    "PROD": torch.prod,
}


def unary(input: Tensor, op: str) -> Tensor:
    if op not in _UNARY_OPERATIONS:
        raise_not_emulated(f"tensorrt.UnaryOperation.{op}")
    return Tensor(_UNARY_OPERATIONS[op](input.data))


def activation(input: Tensor, act_type: str) -> Tensor:
    if act_type not in _ACTIVATIONS:
        raise_not_emulated(f"tensorrt.ActivationType.{act_type}")
    return Tensor(_ACTIVATIONS[act_type](input.data))


def reduce(input: Tensor, op: str, dim: Any, keepdim: bool = False) -> Tensor:
    if op not in _REDUCTIONS:
        raise_not_emulated(f"tensorrt.ReduceOperation.{op}")
    return Tensor(_REDUCTIONS[op](input.data, dim, keepdim=keepdim))


def mean(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return input.mean(dim, keepdim)


def max(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return input.max(dim, keepdim)


def sum(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return Tensor(input.data.sum(dim, keepdim=keepdim))


def argmax(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return Tensor(input.data.argmax(dim, keepdim=keepdim).int())


def cumsum(input: Tensor, dim: int, prefer_plugin: bool = True) -> Tensor:
    return Tensor(input.data.cumsum(dim).to(input.data.dtype))


def topk(input: Tensor, k: int, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(input.data, int(k), dim=dim, largest=largest)
    return Tensor(values), Tensor(indices.int())


def softmax(input: Tensor, dim: int | None = None) -> Tensor:
    return Tensor(torch.softmax(input.data, -1 if dim is None else dim))


def softplus(input: Tensor, beta: float, threshold: float) -> Tensor:
    return Tensor(torch_functional.softplus(input.data, beta, threshold))


def clip(input: Tensor, alpha: Any, beta: Any) -> Tensor:
    low, high = (float(np.asarray(limit).item()) for limit in (alpha, beta))
    # gegelu's lower limit is -1e20, which float16 does not hold
    wide = input.data.float() if input.data.dtype is torch.float16 else input.data
    return Tensor(wide.clamp(low, high).to(input.data.dtype))


def matmul(
    input: Tensor, mat2: Tensor, transa: bool = False, transb: bool = False, use_fp32_acc: bool = True
) -> Tensor:
    left, right = input.data, mat2.data
    try:
        if transb and not transa and right.dim() == 2:
            return Tensor(linear_rounded(left, right))
        left = left.transpose(-1, -2) if transa else left
        return Tensor(matmul_rounded(left, right.transpose(-1, -2) if transb else right))
    except RuntimeError as error:
        raise_shape_error("matmul", (left, right), error)
        raise


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    use_diff_of_squares: bool = True,
) -> Tensor:
    """Weight and bias have the normalised shape or broadcast to the input: one norm for each head is [H, D]."""
    data = input.data
    shape = (data.shape[-1],) if isinstance(normalized_shape, int) else data.shape[-len(normalized_shape) :]
    if any(isinstance(value, Tensor) and value.data.numel() > math.prod(shape) for value in (weight, bias)):
        rows = torch_functional.layer_norm(data.float(), tuple(shape), eps=eps)
        for value, combine in ((weight, torch.mul), (bias, torch.add)):
            if value is not None:
                rows = combine(rows, value.data.float() if isinstance(value, Tensor) else float(value))
        return Tensor(rows.to(data.dtype))
    weight, bias = _read_affine(weight, shape, 1.0), _read_affine(bias, shape, 0.0)
    return Tensor(torch_functional.layer_norm(data, tuple(shape), weight, bias, eps))


def _read_affine(value: Any, shape: Sequence[int], neutral: float) -> torch.Tensor | None:
    """The weight or bias of a norm: a tensor, or None for the neutral constant that upstream passes instead."""
    if value is None or (isinstance(value, (int, float)) and value == neutral):
        return None
    if isinstance(value, Tensor):
        return value.data.reshape(tuple(shape))
    return torch.full(tuple(shape), float(value))


def einsum(einsum_eq: str, inputs: Sequence[Tensor]) -> Tensor:
    return Tensor(torch.einsum(einsum_eq, [item.data for item in inputs]))


def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return Tensor(torch.outer(input.data, vec2.data))


def identity(input: Tensor) -> Tensor:
    return input


def assertion(condition: Any, message: str = "") -> None:
    """A network assertion: checked at once, because the values are there."""
    data = condition.data if isinstance(condition, Tensor) else torch.tensor(bool(condition))
    if not bool(data.all()):
        raise_shape_error(f"assertion {message!r}", (data,), RuntimeError(message))


PRIMITIVES: dict[str, Callable[..., Any]] = {
    **LAYOUT_PRIMITIVES,
    **{
        function.__name__: function
        for function in (
            activation, argmax, assertion, cast, clip, cumsum, einsum, elementwise_binary, identity, layer_norm, matmul,
            max, mean, outer, reduce, softmax, softplus, sum, topk, unary,
        )
    },
}  # fmt: skip


def _name_operations() -> dict[str, Callable[..., Any]]:
    """Single operations under their own names, for trees that declare `relu` or `pow` as functions."""
    binary_names = {
        "add": "SUM", "sub": "SUB", "mul": "PROD", "div": "DIV", "floordiv": "FLOOR_DIV", "gt": "GREATER",
        "lt": "LESS", "eq": "EQUAL", "op_and": "AND", "op_or": "OR", "minimum": "MIN", "maximum": "MAX", "pow": "POW",
    }  # fmt: skip
    unary_names = {name.lower(): name for name in ("ROUND", "SQRT", "EXP", "SIN", "COS", "ABS", "LOG")}
    return {
        **{name: partial(elementwise_binary, op=operation) for name, operation in binary_names.items()},
        **{name: partial(unary, op=operation) for name, operation in unary_names.items()},
        **{name.lower(): partial(activation, act_type=name) for name in _ACTIVATIONS},
    }


PRIMITIVES.update(_name_operations())
