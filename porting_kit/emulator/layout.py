"""Primitive operations of tensorrt_llm.functional that move data: shapes, slices, lookups, constants."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional

from porting_kit.emulator.arithmetic import raise_shape_error
from porting_kit.emulator.collectives import allgather, allreduce
from porting_kit.emulator.network import find_running_device, is_recording
from porting_kit.emulator.symbols import raise_not_emulated
from porting_kit.emulator.tensor_type import Tensor, read_array, read_operand, read_shape, resolve_torch_dtype


def constant(ndarray: np.ndarray) -> Tensor:
    data = read_array(ndarray)
    return Tensor(data if data.numel() == 1 or not data.is_floating_point() else data.to(find_running_device()))


def constant_to_tensor_(input: Any, dtype: Any = None, to_array: bool = True) -> Tensor:
    if isinstance(input, Tensor):
        return input
    if dtype is None:
        dtype = "bool" if isinstance(input, bool) else "int32" if isinstance(input, int) else "float32"
    return Tensor(torch.tensor([input] if to_array else input, dtype=resolve_torch_dtype(dtype)))


def view(input: Tensor, shape: Any, zero_is_placeholder: bool = True) -> Tensor:
    return input.view(shape, zero_is_placeholder)


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    return input.permute(dims)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    return input.transpose(dim0, dim1)


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return input.flatten(start_dim, end_dim)


def flip(input: Tensor, dims: Sequence[int]) -> Tensor:
    return Tensor(input.data.flip(tuple(dims)))


def expand_dims(input: Tensor, dim: int | Sequence[int], shape_cast_dtype: Any = None) -> Tensor:
    data = input.data
    for index in sorted((dim,) if isinstance(dim, int) else dim):
        data = data.unsqueeze(index)
    return Tensor(data)


def unsqueeze(input: Tensor, axis: int) -> Tensor:
    return Tensor(input.data.unsqueeze(axis))


def squeeze(input: Tensor, dim: Any = None, zero_is_placeholder: bool = False) -> Tensor:
    return Tensor(input.data.squeeze() if dim is None else input.data.squeeze(dim))


def expand(input: Tensor, expand_shape: Any) -> Tensor:
    return Tensor(input.data.expand(read_shape(expand_shape)))


def shape(input: Tensor, dim: int | None = None, cast_to_dtype: Any = None, clip_before_cast: Any = None) -> Tensor:
    sizes = torch.tensor(input.data.shape if dim is None else input.data.shape[dim], dtype=torch.int64)
    if clip_before_cast is not None:
        sizes = sizes.clamp(*clip_before_cast)
    return Tensor(sizes if cast_to_dtype is None else sizes.to(resolve_torch_dtype(cast_to_dtype)))


def slice(input: Tensor, starts: Any, sizes: Any, strides: Any = None, mode: Any = None) -> Tensor:
    if mode is not None:
        raise_not_emulated(f"functional.slice with mode {mode}")
    data = input.data
    starts, sizes = read_shape(starts), read_shape(sizes)
    steps = [1] * data.dim() if strides is None else read_shape(strides)
    for dim, (start, size, step) in enumerate(zip(starts, sizes, steps, strict=True)):
        if step == 1:
            if start or size != data.shape[dim]:
                data = data.narrow(dim, start, size)
        else:
            data = data.narrow(dim, start, (size - 1) * step + 1)[
                (*(builtins.slice(None),) * dim, builtins.slice(None, None, step))
            ]
    return Tensor(data)


def concat(inputs: Sequence[Any], dim: int = 0) -> Tensor:
    parts = [item.data if isinstance(item, Tensor) else torch.tensor([item]) for item in inputs]
    parts = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    devices = {part.device for part in parts}
    if len(devices) > 1:
        target = next(device for device in devices if device.type != "cpu")
        parts = [part.to(target) for part in parts]
    return Tensor(torch.cat(parts, dim))


def stack(inputs: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(torch.stack([item.data for item in inputs], dim))


def split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> list[Tensor]:
    return tensor.split(split_size_or_sections, dim)


def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    return [Tensor(part) for part in torch.chunk(tensor.data, chunks, dim)]


def unbind(input: Tensor, dim: int = 0) -> list[Tensor]:
    return input.unbind(dim)


def repeat_interleave(tensor: Tensor, repeats: int, dim: int) -> Tensor:
    return Tensor(tensor.data.repeat_interleave(repeats, dim))


def arange(start: Any, end: Any, dtype: Any) -> Tensor:
    ends = [int(item.data.reshape(-1)[0]) if isinstance(item, Tensor) else int(item) for item in (start, end)]
    return Tensor(torch.arange(*ends, dtype=resolve_torch_dtype(dtype), device=find_running_device()))


def gather(input: Tensor, dim: int, indices: Any) -> Tensor:
    index = torch.tensor([indices]) if isinstance(indices, int) else indices.data
    return Tensor(input.data.gather(dim, index.to(input.data.device).long()))


def gather_nd(input: Tensor, indices: Tensor, batch_dims: int = 1) -> Tensor:
    if batch_dims != 0:
        raise_not_emulated("functional.gather_nd with batch dimensions")
    return Tensor(input.data[tuple(indices.data.long().unbind(-1))])


def select(input: Tensor, dim: int, index: Any) -> Tensor:
    number = int(index.data.reshape(-1)[0]) if isinstance(index, Tensor) else int(index)
    return Tensor(input.data.select(dim, number))


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return Tensor(input.data.index_select(dim, index.data.to(input.data.device).reshape(-1).long()))


def scatter(input: Tensor, dim: int, indices: Tensor, updates: Tensor) -> Tensor:
    return Tensor(input.data.scatter(dim, indices.data.long(), updates.data))


def scatter_nd(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    data = input.data.clone()
    data[tuple(mask.data.long().unbind(-1))] = source.data
    return Tensor(data)


def nonzero(input: Tensor) -> Tensor:
    return Tensor(torch.nonzero(input.data).T.int())


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    return Tensor(input.data.masked_select(mask.data))


def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return Tensor(input.data.masked_scatter(mask.data, source.data))


def where(condition: Any, left: Any, right: Any) -> Tensor:
    condition = condition.data if isinstance(condition, Tensor) else torch.tensor(bool(condition))
    left_data = left.data if isinstance(left, Tensor) else read_operand(left, right)
    right_data = right.data if isinstance(right, Tensor) else read_operand(right, left)
    devices = [item.device for item in (condition, left_data, right_data)]
    target = next((device for device in devices if device.type != "cpu"), devices[0])
    return Tensor(torch.where(condition.to(target), left_data.to(target), right_data.to(target)))


def embedding(
    input: Tensor,
    weight: Tensor,
    tp_size: int = 1,
    tp_group: Any = None,
    sharding_dim: int = 0,
    tp_rank: int | None = None,
    per_token_scale: Any = None,
    padding: Any = None,
) -> Tensor:
    """Table lookup; a table sharded over ranks is looked up in parts and summed (dim 0) or gathered (dim 1).

    `padding` (rows that later releases add for the alignment of TensorRT's weights) is never looked up.
    """
    if per_token_scale is not None:
        raise_not_emulated("functional.embedding of a quantised table")
    table, ids = weight.data, input.data.to(weight.data.device).long()
    if tp_size == 1 or tp_group is None:
        is_checked = ids.device.type == "cpu" and ids.numel() and not is_recording()
        if is_checked and not 0 <= int(ids.min()) <= int(ids.max()) < table.shape[0]:
            reason = f"ids {int(ids.min())} to {int(ids.max())} in a table of {table.shape[0]} rows"
            raise_shape_error("embedding", (ids, table), RuntimeError(reason))
        return Tensor(torch_functional.embedding(ids, table))
    if sharding_dim == 1:
        return allgather(Tensor(torch_functional.embedding(ids, table)), tp_group, gather_dim=-1)
    local = ids - table.shape[0] * int(tp_rank or 0)
    is_here = (local >= 0) & (local < table.shape[0])
    part = torch_functional.embedding(local.masked_fill(~is_here, 0), table) * is_here.unsqueeze(-1)
    return allreduce(Tensor(part), tp_group)


class Conditional:
    """functional.Conditional: the condition has a value, so one branch is the output (both have been computed)."""

    def __init__(self, condition: Tensor) -> None:
        self._is_true = bool(condition.data.reshape(-1)[0])

    def add_input(self, input: Tensor) -> Tensor:
        return input

    def add_output(self, true_value: Tensor, false_value: Tensor) -> Tensor:
        return true_value if self._is_true else false_value


LAYOUT_PRIMITIVES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        arange, chunk, concat, constant, constant_to_tensor_, embedding, expand, expand_dims, flatten, flip, gather,
        gather_nd, index_select, masked_scatter, masked_select, nonzero, permute, repeat_interleave, scatter,
        scatter_nd, select, shape, slice, split, squeeze, stack, transpose, unbind, unsqueeze, view, where,
    )
}  # fmt: skip
