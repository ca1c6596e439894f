"""The class that stands in for tensorrt_llm.parameter.Parameter: a named slot that holds a torch tensor, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from porting_kit.emulator.tensor_type import Tensor, read_array, resolve_torch_dtype
from porting_kit.emulator.tensorrt_types import DATA_TYPES, DataType


class Parameter:
    """A parameter of a Module.

    Args:
        value: initial value, numpy or torch.
        shape: shape when there is no value yet.
        dtype: TensorRT data type or its name; FLOAT when None.
        is_buffer: whether the module computed it itself; such a parameter does not come from a checkpoint.
        prefer_managed: ignored (a matter of TensorRT's weight streaming).
    """

    _DEFAULT_DTYPE = DataType.FLOAT

    def __init__(
        self,
        value: Any = None,
        shape: Any = None,
        dtype: Any = None,
        is_buffer: bool = False,
        prefer_managed: bool = False,
    ) -> None:
        self._dtype = DATA_TYPES[resolve_torch_dtype(dtype)] if dtype is not None else self._DEFAULT_DTYPE
        self.is_buffer = is_buffer
        self._prefer_managed = prefer_managed
        self._tensor: Tensor | None = None
        self._shape = tuple(int(size) for size in (shape if value is None else value.shape))
        if value is not None:
            self._tensor = Tensor(read_value(value))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def value(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError(f"a parameter of shape {self._shape} has no value: load the checkpoint first")
        return self._tensor

    @value.setter
    def value(self, value: Any) -> None:
        data = read_value(value)
        if tuple(data.shape) != self._shape and data.dim() == 0 and int(np.prod(self._shape)) == 1:
            data = data.reshape(self._shape)
        # The same check as tensorrt_llm.parameter.Parameter.value, whose caller turns it into a RuntimeError.
        assert tuple(data.shape) == self._shape, (
            f"The value updated is not the same shape as the original. "
            f"Updated: {tuple(data.shape)}, original: {self._shape}"
        )
        self._tensor = Tensor(data)

    def set_value_or_dummy(self, value: Any) -> None:
        """Take a value of any shape, as a pruned checkpoint needs: a misfit becomes zeros."""
        data = read_value(value)
        self.value = data if tuple(data.shape) == self._shape else torch.zeros(self._shape, dtype=data.dtype)

    def is_inited(self) -> bool:
        return self._tensor is not None

    def is_managed(self, network: Any = None) -> bool:
        return False

    def get_tensor(self, network: Any = None) -> Tensor:
        return self.value

    def get_constant_tensor(self, network: Any = None) -> Tensor:
        return self.value

    def get_managed_tensor(self, network: Any = None, need_transpose: bool = False) -> Tensor:
        return self.value

    @property
    def raw_value(self) -> np.ndarray:
        data = self.value.data.detach().cpu()
        return data.view(torch.int16).numpy().view(np.dtype("V2")) if data.dtype is torch.bfloat16 else data.numpy()

    def move_to(self, device: torch.device, is_double: bool, placed: dict[int, torch.Tensor]) -> None:
        """Place the value on a device.

        Args:
            device: the target.
            is_double: widen a float32 buffer that meets float64 weights.
            placed: address of a value -> its placed tensor, so that tables shared by layers stay shared.
        """
        if self._tensor is None:
            return
        data = self._tensor.data
        key = data.data_ptr()
        if data.numel() and key in placed and placed[key].shape == data.shape:
            self._tensor = Tensor(placed[key])
            return
        moved = data.to(device)
        moved = moved.double() if is_double and moved.dtype is torch.float32 else moved
        placed[key] = moved
        self._tensor = Tensor(moved)


def read_value(value: Any) -> torch.Tensor:
    """A torch tensor over a numpy array or torch tensor."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, torch.Tensor):
        return value.detach()
    return read_array(value)
