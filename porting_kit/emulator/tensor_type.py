"""The class that stands in for tensorrt_llm.functional.Tensor: an eager torch tensor with that class's methods.

TensorRT-LLM's Tensor describes a node of a network and is always truthy; its code relies on that (`if tensor:`, the
builtin `max(tensor, number)`), so this one is always truthy too, although it holds values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from porting_kit.emulator.arithmetic import SCALAR_OPERATIONS, compute_binary, raise_shape_error
from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensorrt_types import (
    DATA_TYPES,
    TORCH_DTYPE_OF_NAME,
    TORCH_DTYPES,
    DataType,
    torch_to_numpy_dtype_is_abstract,
)


class Tensor:
    """An eager tensor under TensorRT-LLM's Tensor interface.

    Args:
        data: the torch tensor; every other argument of the real class describes a network input, which the emulator
            makes itself, and is refused.
        name: name given by mark_output, for messages.
    """

    __slots__ = ("__dict__", "__weakref__", "data", "name")

    def __init__(self, data: torch.Tensor | None = None, name: str | None = None, **network_input: Any) -> None:
        if not isinstance(data, torch.Tensor):
            raise_not_emulated(f"a network input Tensor(name={name!r})")
        self.data = data
        self.name = name

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Tensor(shape={tuple(self.data.shape)}, dtype={self.data.dtype}, name={self.name!r})"

    # -- description ---------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> DataType:
        return DATA_TYPES[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.data.shape[dim]

    def rank(self) -> int:
        return self.data.dim()

    def ndim(self) -> int:
        return self.data.dim()

    def is_dynamic(self, dim: int | None = None) -> bool:
        return False

    def is_trt_wrapper(self) -> bool:
        return False

    @property
    def location(self) -> str:
        return "DEVICE"

    @property
    def trt_tensor(self) -> None:
        raise_not_emulated("Tensor.trt_tensor (an operation that talks to TensorRT itself)")

    @property
    def producer(self) -> None:
        raise_not_emulated("Tensor.producer")

    def mark_output(self, name: str | None = None, dtype: Any = None) -> None:
        """Make this tensor an output of the running model, cast to `dtype` as the engine would."""
        from porting_kit.emulator.network import find_running_network

        find_running_network().mark_output(self, name, dtype)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return binary(self, other, "SUM")

    def __radd__(self, other: Any) -> Tensor:
        return binary(other, self, "SUM")

    def __sub__(self, other: Any) -> Tensor:
        return binary(self, other, "SUB")

    def __rsub__(self, other: Any) -> Tensor:
        return binary(other, self, "SUB")

    def __mul__(self, other: Any) -> Tensor:
        return binary(self, other, "PROD")

    def __rmul__(self, other: Any) -> Tensor:
        return binary(other, self, "PROD")

    def __truediv__(self, other: Any) -> Tensor:
        return binary(self, other, "DIV")

    def __rtruediv__(self, other: Any) -> Tensor:
        return binary(other, self, "DIV")

    def __floordiv__(self, other: Any) -> Tensor:
        return binary(self, other, "FLOOR_DIV")

    def __mod__(self, other: Any) -> Tensor:
        return binary(self, binary(binary(self, other, "FLOOR_DIV"), other, "PROD"), "SUB")

    def __lt__(self, other: Any) -> Tensor:
        return binary(self, other, "LESS")

    def __gt__(self, other: Any) -> Tensor:
        return binary(self, other, "GREATER")

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return binary(self, other, "EQUAL")

    def __ge__(self, other: Any) -> Tensor:
        return binary(binary(self, other, "GREATER"), binary(self, other, "EQUAL"), "OR")

    def __le__(self, other: Any) -> Tensor:
        return binary(binary(self, other, "LESS"), binary(self, other, "EQUAL"), "OR")

    # -- methods that functional.py offers as functions too -------------------------------------------------------

    def view(self, shape: Any, zero_is_placeholder: bool = True) -> Tensor:
        return Tensor(self.data.reshape(read_shape(shape, self.data if zero_is_placeholder else None)))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        return Tensor(self.data.flatten(start_dim, end_dim))

    def permute(self, dims: Sequence[int]) -> Tensor:
        return Tensor(self.data.permute(tuple(dims)))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        return Tensor(self.data.transpose(dim0, dim1))

    def mean(self, dim: Any, keepdim: bool = False) -> Tensor:
        return Tensor(self.data.mean(dim, keepdim=keepdim))

    def max(self, dim: Any, keepdim: bool = False) -> Tensor:
        return Tensor(torch.amax(self.data, dim, keepdim=keepdim))

    def abs(self) -> Tensor:
        return Tensor(self.data.abs())

    def sqrt(self) -> Tensor:
        return Tensor(self.data.sqrt())

    def log(self) -> Tensor:
        return Tensor(self.data.log())

    def cast(self, dtype: Any) -> Tensor:
        return cast(self, dtype)

    def split(self, split_size_or_sections: Any, dim: int = 0) -> list[Tensor]:
        return [Tensor(part) for part in torch.split(self.data, split_size_or_sections, dim)]

    def unbind(self, dim: int = 0) -> list[Tensor]:
        return [Tensor(part) for part in torch.unbind(self.data, dim)]


def resolve_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch type of a TensorRT type or of its name in a config."""
    if isinstance(dtype, DataType):
        return TORCH_DTYPES[dtype]
    if isinstance(dtype, str) and dtype in TORCH_DTYPE_OF_NAME:
        return TORCH_DTYPE_OF_NAME[dtype]
    raise TypeError(f"{dtype!r} is not a data type")


def cast(tensor: Tensor, dtype: Any) -> Tensor:
    """functional.cast; a float64 tensor stays float64 when float32 is asked for (see tensorrt_types)."""
    target = resolve_torch_dtype(dtype)
    source = tensor.data.dtype
    if source is target or (source is torch.float64 and target is torch.float32):
        return tensor
    return Tensor(tensor.data.to(target))


def read_array(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over a numpy array, TensorRT-LLM's abstract bfloat16 and fp8 arrays included (no copy)."""
    array = np.asarray(array)
    abstract = torch_to_numpy_dtype_is_abstract(array.dtype)
    if abstract is not None:
        words = np.int16 if abstract is torch.bfloat16 else np.int8
        return torch.from_numpy(np.ascontiguousarray(array).view(words)).view(abstract)
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    return torch.from_numpy(array) if array.shape else torch.tensor(array[()].item(), dtype=numpy_dtype(array))


def numpy_dtype(array: np.ndarray) -> torch.dtype:
    """The torch type of a numpy array."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def read_shape(shape: Any, placeholder_source: torch.Tensor | None = None) -> list[int]:
    """Plain integers of a shape given as a list of numbers and Tensors, or as one Tensor.

    Args:
        shape: the shape; -1 means inferred.
        placeholder_source: tensor whose dimension replaces a 0, as TensorRT's zero_is_placeholder does; None keeps 0.
    """
    if isinstance(shape, Tensor):
        numbers = shape.data.reshape(-1).tolist()
    else:
        numbers = []
        for item in shape:
            if isinstance(item, Tensor):
                numbers.extend(item.data.reshape(-1).tolist())
            else:
                numbers.append(int(item))
    if placeholder_source is not None and 0 in numbers and placeholder_source.numel():
        numbers = [placeholder_source.shape[i] if number == 0 else number for i, number in enumerate(numbers)]
    return [int(number) for number in numbers]


def binary(left: Any, right: Any, operation: str) -> Tensor:
    """functional.elementwise_binary.

    Raises:
        EmulatorError: the two shapes do not broadcast, or the operation is unknown.
    """
    if type(right) is float and isinstance(left, Tensor) and left.data.is_floating_point():
        fast = SCALAR_OPERATIONS.get(operation)
        if fast is not None:
            return Tensor(fast(left.data, right))
    left = left.data if isinstance(left, Tensor) else read_operand(left, right)
    right = right.data if isinstance(right, Tensor) else read_operand(right, left)
    if left.device != right.device:
        left, right = bring_together(left, right)
    try:
        return Tensor(compute_binary(left, right, operation))
    except RuntimeError as error:
        raise_shape_error(operation, (left, right), error)
        raise


def bring_together(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of two devices on one: shape arithmetic and constants live on the CPU, as TensorRT's shapes do.

    A single number needs no copy; PyTorch takes it from the CPU.
    """
    if left.device.type == "cpu":
        return left.reshape(()) if left.numel() == 1 else left.to(right.device), right
    return left, right.reshape(()) if right.numel() == 1 else right.to(left.device)


def read_operand(value: Any, other: Any) -> torch.Tensor:
    """A constant operand as a tensor of the other operand's type, as a strongly typed network makes it."""
    other = other.data if isinstance(other, Tensor) else other
    if isinstance(value, np.ndarray):
        return read_array(value)
    if isinstance(other, torch.Tensor):
        return torch.tensor(value, dtype=other.dtype)
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)
