"""The Triton kernels as operations on tensors: attention, new and moved rows of a cache, searches.

Attention and the writing of new rows are registered with PyTorch, so that a program that is written down holds each
as one operation. Products are in `gpu_products`.
"""

from __future__ import annotations

import torch

from porting_kit.emulator import gpu_kernels
from porting_kit.emulator.half_precision import HALF_TYPES
from porting_kit.emulator.triton_import import HAS_TRITON

PROGRAMS = 132
"""Programs that fill the largest card of today; attention over long texts is cut into parts while they stay below."""

KEY_BLOCK, WHOLE_KEY_BLOCK = 64, 128
"""Cache rows that one program takes in at a time: of a part, and of all rows."""

SHORT_TOKENS, FEW_PROGRAMS = 256, 32
"""So few cache rows are attended to in one part by so many programs: joining several costs a launch more."""

WIDE_HEAD = 128
"""Head sizes above this leave no shared memory for more than one block of rows at a time."""

SEARCH_BLOCK, MAX_COUNT = 4096, 32
"""Elements that one program searches, and how many of the largest it may be asked for."""

ONE_WARP = 1024
"""Elements up to which a search by one warp, which waits for no other, is fastest."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve this device and type: a GPU with Triton, half precision."""
    return HAS_TRITON and device.type == "cuda" and dtype in HALF_TYPES


@torch.library.custom_op(
    "porting_kit::attend_rows",
    mutates_args=(),
    schema="(Tensor query, Tensor layer, Tensor? mask, int end, float scale, float softcap) -> Tensor",
)
def attend_rows(
    query: torch.Tensor, layer: torch.Tensor, mask: torch.Tensor | None, end: int, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(scale q.k + mask) v over the first rows of a cache, logits, weights and sums in float32.

    Args:
        query: half [B, H, N, D], the last dimension contiguous.
        layer: half [B, 2, K, capacity, D], likewise.
        mask: bool or float32, broadcastable to [B, H, N, end], the last dimension contiguous; None sees every row.
        end: rows of the cache to attend to.
        scale: of the logits.
        softcap: bound of the logits through tanh, before the mask; 0 for none.

    Returns:
        [B, N, H, D] in the type of the query.
    """
    B, H, N, D = query.shape
    K, G = layer.shape[2], H // layer.shape[2]
    block_dim = max(16, 1 << (D - 1).bit_length())

    def count_programs(block: int) -> int:
        return B * K * -(-(G * N) // block)

    # Small blocks of queries in one part beat large ones in several, whose joining is a launch more.
    block_query = next((block for block in (16, 32) if count_programs(block) <= PROGRAMS), 64)
    programs = count_programs(block_query)
    is_short = end <= SHORT_TOKENS and programs >= FEW_PROGRAMS
    parts = 1 if is_short else max(1, min(PROGRAMS // programs, -(-end // KEY_BLOCK)))
    share = -(-end // (parts * KEY_BLOCK)) * KEY_BLOCK
    parts = -(-end // share)
    is_deep = parts == 1 and block_dim <= WIDE_HEAD
    key_block, warps, stages = (WHOLE_KEY_BLOCK, 8, 3) if is_deep else (KEY_BLOCK, 4, 2)
    joined = torch.empty(B, N, H, D, dtype=query.dtype, device=query.device)
    output, top = joined, joined
    weights = joined
    if parts > 1:
        output = torch.empty(parts, B, N, H, D, dtype=torch.float32, device=query.device)
        top, weights = torch.empty(2, parts, B, N, H, dtype=torch.float32, device=query.device)
    kind = 0 if mask is None else 1 if mask.dtype is torch.bool else 2
    bias = output if mask is None else mask.view(torch.uint8) if kind == 1 else mask
    strides = (0, 0, 0) if mask is None else bias.expand(B, H, N, end).stride()[:3]
    gpu_kernels.attend[(B * K, -(-(G * N) // block_query), parts)](
        query, layer[:, 0], layer[:, 1], bias, output, top, weights, scale, softcap, H, N, D, end, share,
        query.stride(0), query.stride(1), query.stride(2), layer.stride(0), layer.stride(2), layer.stride(3), *strides,
        G=G, BIAS=kind, IS_WHOLE=parts == 1, BLOCK_Q=block_query, BLOCK_C=key_block, BLOCK_D=block_dim,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        gpu_kernels.join_parts[(B * N * H,)](
            output, top, weights, joined, B * N * H, D,
            PARTS=parts, BLOCK_P=1 << (parts - 1).bit_length(), BLOCK_D=block_dim, num_warps=1,
        )  # fmt: skip
    return joined


@torch.library.custom_op(
    "porting_kit::store_rows",
    mutates_args=("layer",),
    schema="(Tensor(a!) layer, Tensor pasts, Tensor keys, Tensor values) -> ()",
)
def store_rows(layer: torch.Tensor, pasts: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys and values [B, N, K, D], the last dimension contiguous, behind the pasts int64 [B, 1] of a cache."""
    B, N, K, D = keys.shape
    block = min(1024, 1 << (K * D - 1).bit_length())
    gpu_kernels.store_rows[(B * N, -(-K * D // block))](
        layer, pasts, keys, values, N, K, D,
        layer.stride(0), layer.stride(1), layer.stride(2), layer.stride(3), *keys.stride()[:3], *values.stride()[:3],
        BLOCK=block,
    )  # fmt: skip


def move_rows(joined: torch.Tensor, rows: torch.Tensor, pasts: torch.Tensor) -> None:
    """Move accepted rows together in all layers at once: past + rows[b, i] to past + i; -1 moves nothing.

    Args:
        joined: [layers, B, 2, K, capacity, D], contiguous.
        rows: int64 [B, A], ascending within a request.
        pasts: int64 [B, 1].
    """
    layers, B, _, K, _, D = joined.shape
    A = rows.shape[1]
    gpu_kernels.move_rows[(layers * B * 2 * K,)](
        joined, rows, pasts, A, D, rows.stride(0), joined.stride(0), joined.stride(1), joined.stride(3),
        joined.stride(4), B, HEADS=2 * K, BLOCK_A=1 << (A - 1).bit_length(), BLOCK_D=1 << (D - 1).bit_length(),
        num_warps=1,
    )  # fmt: skip


def can_search(length: int, count: int) -> bool:
    """Whether `find_largest` serves rows of this length."""
    return count <= MAX_COUNT and -(-length // SEARCH_BLOCK) * count <= SEARCH_BLOCK


def find_largest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest elements of the last dimension, in order, and their places; of equals the first comes first.

    Args:
        rows: half [..., length].
        count: how many; see `can_search`.

    Returns:
        values [..., count] and int64 places [..., count].
    """
    *shape, length = rows.shape
    rows = rows.reshape(-1, length).contiguous()

    def search(given: torch.Tensor, places: torch.Tensor | None, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        R, length = given.shape
        chunks = -(-length // block)
        values = torch.empty(R, chunks * count, dtype=rows.dtype, device=rows.device)
        found = torch.empty(R, chunks * count, dtype=torch.int64, device=rows.device)
        gpu_kernels.find_largest[(R, chunks)](
            given, given if places is None else places, values, found, length, chunks,
            HAS_INDICES=places is not None, COUNT=count, BLOCK=block, PLACE_BITS=SEARCH_BLOCK.bit_length() - 1,
            num_warps=1 if block <= ONE_WARP else 8,
        )  # fmt: skip
        return values, found

    values, found = search(rows, None, SEARCH_BLOCK)
    if values.shape[1] > count:
        values, found = search(values, found, 1 << (values.shape[1] - 1).bit_length())
    return values.view(*shape, count), found.view(*shape, count)
