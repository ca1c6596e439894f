"""Tensor and pipeline parallel communication through torch.distributed (gloo on CPU, NCCL on GPUs).

Ranks that have to share a GPU talk through gloo as well, by way of the host: NCCL wants a GPU for each.

A group of one rank needs no communication. A larger group needs the processes that torchrun starts: every rank runs
its own emulator on its own shard, and what the ranks exchange is what the engine's collectives would exchange.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from porting_kit.emulator.tensor_type import Tensor
from porting_kit.errors import EmulatorError

_GROUPS: dict[tuple[int, ...], Any] = {}


def connect_ranks(world_size: int, device: torch.device) -> None:
    """Join the process group that a sharded checkpoint needs; nothing to do for one rank.

    Raises:
        EmulatorError: the checkpoint has several ranks and this process was not started as one of as many.
    """
    if world_size == 1:
        return
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) != world_size:
            raise EmulatorError(
                "a sharded checkpoint needs one process for each of its ranks",
                expected=f"{world_size} processes",
                found=f"{os.environ.get('WORLD_SIZE', '1')} (environment variable WORLD_SIZE)",
                next_step=f"start the command with torchrun --nproc-per-node {world_size}",
            )
        has_own_gpu = device.type == "cuda" and torch.cuda.device_count() >= world_size
        dist.init_process_group("nccl" if has_own_gpu else "gloo")
    if dist.get_world_size() != world_size:
        raise EmulatorError(
            "the process group does not have the checkpoint's size",
            expected=f"{world_size} processes",
            found=dist.get_world_size(),
            next_step=f"start the command with torchrun --nproc-per-node {world_size}",
        )


def find_group(ranks: Sequence[int]) -> Any:
    """The process group of these ranks, made once (only its members need to ask for it)."""
    key = tuple(int(rank) for rank in ranks)
    if key not in _GROUPS:
        is_world = key == tuple(range(dist.get_world_size()))
        _GROUPS[key] = dist.group.WORLD if is_world else dist.new_group(key, use_local_synchronization=True)
    return _GROUPS[key]


def _on_wire(data: torch.Tensor) -> torch.Tensor:
    """The values where the backend can send them from: gloo sends from the host."""
    return data.cpu() if data.is_cuda and dist.get_backend() == "gloo" else data


def allreduce(
    tensor: Tensor,
    group: Sequence[int],
    strategy: Any = None,
    config: Any = None,
    reduce_fusion_params: Any = None,
    **unused: Any,
) -> Tensor:
    """Sum over the ranks of a group; fused residual and norm are never asked for (reduce_fusion is off)."""
    if len(group) == 1:
        return tensor
    data = _on_wire(tensor.data.contiguous().clone())
    dist.all_reduce(data, group=find_group(group))
    return Tensor(data.to(tensor.data.device))


def allgather(tensor: Tensor, group: Sequence[int], gather_dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along `gather_dim`."""
    if len(group) == 1:
        return tensor
    data = _on_wire(tensor.data.contiguous())
    parts = [torch.empty_like(data) for _ in group]
    dist.all_gather(parts, data, group=find_group(group))
    return Tensor(torch.cat(parts, gather_dim).to(tensor.data.device))


def send(tensor: Tensor, tgt: int) -> Tensor:
    """Pass hidden states to the next pipeline rank."""
    dist.send(_on_wire(tensor.data.contiguous()), int(tgt))
    return tensor


def recv(tensor: Tensor, src: int) -> Tensor:
    """Receive hidden states from the previous pipeline rank; `tensor` gives shape and type."""
    data = _on_wire(torch.empty_like(tensor.data))
    dist.recv(data, int(src))
    return Tensor(data.to(tensor.data.device))


def broadcast_output(
    tensor: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor, ranks: Sequence[int]
) -> Any:
    """Give the last pipeline rank's output to all ranks of the pipeline."""
    data = torch.empty(tuple(shape), dtype=like.dtype, device=like.device) if tensor is None else tensor.contiguous()
    sent = _on_wire(data)
    dist.broadcast(sent, int(ranks[-1]), group=find_group(ranks))
    return sent.to(data.device)


def cuda_stream_sync(input_list: Sequence[Tensor], side_stream_id: Any) -> Tensor:
    """Wait for a side stream: here everything is in one order."""
    return input_list[0]


COLLECTIVES = {function.__name__: function for function in (allreduce, allgather, cuda_stream_sync, recv, send)}
