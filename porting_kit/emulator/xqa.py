"""The real kernel: TensorRT-LLM's XQA with several query tokens, as flashinfer-python ships it, for tree steps.

`open_xqa_kernel` gives a callable that takes the place of the emulator's own attention wherever a generation step
carries a tree. Keys and values go through a paged cache whose blocks lie in shuffled order, and the tree through the
packed mask, as in TensorRT-LLM. The kernel sees neither ALiBi, nor soft-cap, nor window, as it does not there.

It covers the kernel's arithmetic. TensorRT-LLM's own dispatch before the kernel (which may refuse the shape) and the
compiled kernels of older releases are not covered: the source is that of the installed flashinfer-python.
The emulator may run on the CPU: tensors are moved to the card for the kernel and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from porting_kit.errors import EnvironmentMissing, KernelRefusal

TESTED_VERSION = "0.7.4"
CAPABILITIES = (9, 10, 12)
"""Major compute capabilities that flashinfer's XQA runs on (flashinfer/xqa.py 0.7.4)."""
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
BLOCK_SIZES = (16, 32, 64, 128)
LARGEST_HEAD_SIZE = 256
SEMAPHORE_BYTES = 8 << 20
"""Counters of the kernel, at the front of the workspace and zero at first use (flashinfer/decode.py 0.7.4)."""
SCRATCH_BYTES = 120 << 20
STALE_VALUE = 1.0
"""What cache rows behind a sequence hold: a real cache holds old tokens there, which must not count."""


@dataclass(frozen=True)
class KernelBuild:
    """Where the kernel came from; printed beside every figure.

    Args:
        version, commit: of flashinfer-python.
        device: name of the card.
        compute_capability: of the card.
        cuda: CUDA version that torch was built for.
    """

    version: str
    commit: str
    device: str
    compute_capability: str
    cuda: str

    def __str__(self) -> str:
        return (
            f"XQA of flashinfer-python {self.version} (commit {self.commit[:12]}) on {self.device}, "
            f"compute capability {self.compute_capability}, CUDA {self.cuda}"
        )


@dataclass(frozen=True)
class XqaCall:
    """A call that is ready: `launch` fills `output` [B, 1, N, H, D], again and again."""

    output: torch.Tensor
    launch: Callable[[], None]


class XqaKernel:
    """XQA for several query tokens, called as the emulator calls its own attention.

    Args:
        function: flashinfer's `xqa`.
        tokens_per_block: rows of one cache block.
        device: where it runs.
        build: where it came from.
    """

    def __init__(self, function: Any, *, tokens_per_block: int, device: torch.device, build: KernelBuild) -> None:
        self.function = function
        self.tokens_per_block = tokens_per_block
        self.device = device
        self.build = build
        self.calls = 0
        self._workspace = torch.zeros(SEMAPHORE_BYTES + SCRATCH_BYTES, dtype=torch.uint8, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pasts: torch.Tensor,
        tree: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of each request's nodes over its past and the nodes they see.

        Args:
            query: [B, N, H, D].
            keys, values: [B, K, rows, D]; request b's nodes are rows pasts[b] .. pasts[b] + N - 1.
            pasts: int64 [B, 1].
            tree: bool [B, N, N], what each node sees of the nodes.
            scale: factor on q.k.

        Returns:
            [B, N, H, D] in the type and on the device of the query.

        Raises:
            KernelRefusal: a type or head size that the kernel does not have.
            EnvironmentMissing: the kernel cannot be compiled or started here.
        """
        call = self.prepare(query, keys, values, pasts, tree, scale)
        try:
            call.launch()
        except (RuntimeError, OSError, ValueError) as error:
            B, N, H, D = query.shape
            raise EnvironmentMissing(
                "the XQA kernel does not compile or start here",
                expected=f"flashinfer-python {TESTED_VERSION} with the CUDA compiler (nvcc) on the PATH",
                found=next(iter(str(error).splitlines()), "") or type(error).__name__,
                where=f"{self.build}; batch {B}, {N} nodes, {H} / {keys.shape[1]} heads of size {D}",
                next_step="install the CUDA toolkit that torch was built for, or use kernel: release:<x>",
            ) from error
        self.calls += 1
        return call.output[:, 0].to(query.device)

    def prepare(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pasts: torch.Tensor,
        tree: torch.Tensor,
        scale: float,
        *,
        cache_scale: float | None = None,
    ) -> XqaCall:
        """Everything of a call but the launch; arguments as for the call itself.

        Args:
            cache_scale: keys and values are stored in fp8 (e4m3), divided by this; None keeps their own type.

        Raises:
            KernelRefusal: a type or head size that the kernel does not have.
        """
        B, N, H, D = query.shape
        refuse_geometry(query.dtype, D)
        rows = torch.stack((keys, values)).to(self.device)
        stored = rows if cache_scale is None else (rows / cache_scale).to(torch.float8_e4m3fn)
        pool, table = self._store_blocks(stored)
        output = torch.full((B, 1, N, H, D), math.nan, dtype=query.dtype, device=self.device)
        nodes = query.to(self.device).contiguous().unsqueeze(1)
        # Without several nodes the kernel is another one, with neither tree nor node dimension.
        is_tree = N > 1
        positional = (
            nodes if is_tree else nodes[:, :, 0],
            *pool,
            table,
            (pasts.to(self.device) + N).to(torch.int32).view(torch.uint32),
            output if is_tree else output[:, :, 0],
            self._workspace[SEMAPHORE_BYTES:],
            self._workspace[:SEMAPHORE_BYTES].view(torch.uint32),
            keys.shape[1],
            self.tokens_per_block,
        )
        # The kernel divides by the square root of the head size itself.
        named = {"q_scale": scale * math.sqrt(D), "kv_layout": "HND"}
        if cache_scale is not None:
            named["kv_scale"] = cache_scale
        if is_tree:
            named |= {"q_seq_len": N, "mask": pack_mask(tree.to(self.device))}
        return XqaCall(output, partial(self.function, *positional, **named))

    def _store_blocks(self, rows: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Keys and values as blocks of a paged cache in shuffled order.

        Args:
            rows: [2, B, K, rows, D].

        Returns:
            (keys, values) [blocks, K, tokens_per_block, D] each, and the block of each part of each request,
            int32 [B, blocks of a request].
        """
        _, B, K, length, D = rows.shape
        size = self.tokens_per_block
        per_request = -(-length // size)
        # Eight-bit types are moved as bytes: PyTorch has few operations on them.
        raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        stale = torch.full((1,), STALE_VALUE).to(rows.dtype).view(raw.dtype)
        padded = stale.to(self.device).expand(2, B, K, per_request * size, D).clone()
        padded[:, :, :, :length] = raw
        blocks = padded.view(2, B, K, per_request, size, D).transpose(2, 3).reshape(2, B * per_request, K, size, D)
        order = torch.randperm(B * per_request, generator=torch.Generator().manual_seed(0)).to(self.device)
        pool = torch.empty_like(blocks)
        pool[:, order] = blocks
        pool = pool.view(rows.dtype)
        return (pool[0], pool[1]), order.view(B, per_request).to(torch.int32)


def open_xqa_kernel(tokens_per_block: int = 64) -> XqaKernel:
    """Find flashinfer and a card that its XQA runs on.

    Args:
        tokens_per_block: the port's cache block.

    Raises:
        EnvironmentMissing: no GPU, one that the kernel is not for, or no flashinfer-python.
        KernelRefusal: a block size that the kernel does not have.
    """
    if tokens_per_block not in BLOCK_SIZES:
        raise KernelRefusal(
            "XQA has no kernel for this cache block",
            expected=f"tokens_per_block of {', '.join(map(str, BLOCK_SIZES))}",
            found=str(tokens_per_block),
            next_step="set target.tokens_per_block to 64",
        )
    device, capability = find_card()
    try:
        from flashinfer.version import __git_commit__, __version__
        from flashinfer.xqa import xqa
    except Exception as error:  # a broken installation fails in many ways while it is imported
        raise EnvironmentMissing(
            "kernel: xqa needs flashinfer-python, which ships the XQA kernels",
            expected=f"the extra `gpu` (flashinfer-python, tested with {TESTED_VERSION})",
            found=f"{type(error).__name__}: {error}",
            next_step="pip install 'porting-kit[gpu]', or use kernel: release:<x>, which imitates a release's kernels",
        ) from error
    build = KernelBuild(
        version=str(__version__),
        commit=str(__git_commit__),
        device=torch.cuda.get_device_name(device),
        compute_capability=capability,
        cuda=str(torch.version.cuda),
    )
    return XqaKernel(xqa, tokens_per_block=tokens_per_block, device=device, build=build)


def find_card() -> tuple[torch.device, str]:
    """The current GPU and its compute capability.

    Raises:
        EnvironmentMissing: there is none, or XQA does not run on it.
    """
    if not torch.cuda.is_available():
        raise EnvironmentMissing(
            "kernel: xqa runs NVIDIA's own kernel and needs a GPU",
            expected=f"a card of compute capability {', '.join(f'{major}.x' for major in CAPABILITIES)}",
            found=f"no GPU that torch {torch.__version__} can use",
            next_step="run the alignment on a GPU machine, or use kernel: release:<x>, which imitates a release's "
            "kernels without one",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        raise EnvironmentMissing(
            "the XQA kernels of flashinfer-python are not for this card",
            expected=f"compute capability {', '.join(f'{known}.x' for known in CAPABILITIES)}",
            found=f"{torch.cuda.get_device_name(device)}, {major}.{minor}",
            next_step="use kernel: release:<x>, which imitates a release's kernels",
        )
    return device, f"{major}.{minor}"


def refuse_geometry(dtype: torch.dtype, head_size: int) -> None:
    """Stop for what the kernel's source does not compile for.

    Raises:
        KernelRefusal: another type than half precision, or a head size outside its range.
    """
    if dtype not in KERNEL_DTYPES:
        raise KernelRefusal(
            "XQA has no kernel for this type",
            expected="float16 or bfloat16",
            found=str(dtype).removeprefix("torch."),
            next_step="set dtype: float16 or bfloat16 in the port file",
        )
    if head_size % 16 or not 16 <= head_size <= LARGEST_HEAD_SIZE:
        raise KernelRefusal(
            "XQA has no kernel for this head size",
            expected=f"a multiple of 16 up to {LARGEST_HEAD_SIZE}",
            found=str(head_size),
            next_step="set fit: auto, which pads the head",
        )


def pack_mask(tree: torch.Tensor) -> torch.Tensor:
    """The tree as the kernel reads it: bit b % 16 of half-word b // 16 says whether a node sees node b.

    Args:
        tree: bool [B, N, N].

    Returns:
        uint16 [B, N, 2 * ceil(N / 32)].
    """
    B, N, _ = tree.shape
    halves = 2 * -(-N // 32)
    bits = torch.zeros(B, N, halves * 16, dtype=torch.int32, device=tree.device)
    bits[:, :, :N] = tree
    words = (bits.view(B, N, halves, 16) << torch.arange(16, device=tree.device, dtype=torch.int32)).sum(-1)
    # PyTorch has few operations on unsigned types: the low halves of int32 words are the same bits.
    return words.to(torch.int32).view(torch.int16)[..., ::2].contiguous().view(torch.uint16)
