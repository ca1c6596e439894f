"""The Triton kernels as operations on tensors: which of them serves a shape, and how a program calls it.

Attention and the writing of new rows are registered with PyTorch, so that a program that is written down holds each
as one operation. For products the fastest way is measured on the model's own weights, PyTorch's own among them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from porting_kit.emulator import gpu_kernels
from porting_kit.emulator.half_precision import HALF_TYPES

MAX_ROWS = 128
"""Rows of a product that the kernels take; more are a matter of arithmetic, where the library is best."""

PROGRAMS = 132
"""Programs that fill the largest card of today; attention over long texts is cut into parts until there are as many."""

KEY_BLOCK = 64
BYTES_PER_SECOND = 3e12
"""At which parts of a product are assumed to be read again."""

LAUNCH_MS = 1.5e-3
"""Of a small kernel in a captured step: parts that are added up by themselves (measured on an H200)."""

SEARCH_BLOCK, MAX_COUNT = 4096, 32
"""Elements that one program searches, and how many of the largest it may be asked for."""

TIMED_BYTES = 256 << 20
"""Weights that a plan is timed on in turn: more than a card's cache, so that they come from memory as in a step."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve this device and type: a GPU with Triton, half precision."""
    return gpu_kernels.HAS_TRITON and device.type == "cuda" and dtype in HALF_TYPES


class ProductPlan(NamedTuple):
    """How a product of few rows is computed.

    Args:
        kind: "library" is PyTorch's own, "row" the kernel for one row, "rows" the one for several.
        block_out, block_in: outputs and inputs of one tile.
        parts: parts of the sum over the inputs, added up by the caller.
        warps, stages: of the kernel.
        block_rows: rows of one tile at most; fewer than all read the weight several times, which is fast where a card's
            cache holds it.
    """

    kind: str
    block_out: int = 0
    block_in: int = 0
    parts: int = 1
    warps: int = 4
    stages: int = 3
    block_rows: int = MAX_ROWS


LIBRARY = ProductPlan("library")
_ROW_TILES = ((4, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 1024, 8), (2, 2048, 4), (1, 2048, 4))
_ROWS_TILES = ((32, 128, 4, 4), (64, 64, 5, 4), (64, 128, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8))
ROW_PLANS = tuple(ProductPlan("row", block_out, block_in, warps=warps) for block_out, block_in, warps in _ROW_TILES)
ROWS_PLANS = tuple(
    ProductPlan("rows", block_out, block_in, parts, warps, stages)
    for block_out, block_in, stages, warps in _ROWS_TILES
    for parts in (1, 2, 4)
)
# Small weights: a step waits for single programs, so that many of them with little work each are best.
SMALL_BYTES = 8 << 20
SMALL_PLANS = tuple(
    ProductPlan("rows", block_out, block_in, parts, 4, stages, block_rows)
    for block_out, block_in, stages in ((16, 256, 3), (32, 128, 4), (32, 256, 3), (16, 1024, 1))
    for block_rows in (16, 64)
    for parts in (1, 2)
)
_LOG = logging.getLogger(__name__)
_plans: dict[tuple, tuple[ProductPlan, float]] = {}
"""Fastest plan and its milliseconds, by shape."""


def multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ProductPlan,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows [R, fan_in] times weight [fan_in, fan_out], whose transpose is contiguous, plus bias [fan_out].

    Args:
        second: a weight like the first, whose product follows the first one's in each row; only without a bias.

    Returns:
        [R, fan_out] in the type of the rows, [R, 2 * fan_out] with a second weight; with several parts float32
        [parts, R, ...], to be summed.
    """
    if plan.kind == "library":
        return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    weights = (weight,) if second is None else (weight, second)
    rows = rows.contiguous()
    (R, fan_in), fan_out = rows.shape, weight.shape[1]
    width = len(weights) * fan_out
    grid = (len(weights) * -(-fan_out // plan.block_out), plan.parts)
    options = {"num_warps": plan.warps, "num_stages": plan.stages, "IS_PAIR": second is not None}
    held = bias if bias is not None else rows
    if plan.kind == "row":
        output = torch.empty(1, width, dtype=rows.dtype, device=rows.device)
        kernel = gpu_kernels.multiply_row[grid[:1]]
        kernel(
            rows, weights[0], weights[-1], held, output, fan_in, fan_out,
            HAS_BIAS=bias is not None, BLOCK_O=plan.block_out, BLOCK_I=plan.block_in, **options,
        )  # fmt: skip
        return output
    dtype = rows.dtype if plan.parts == 1 else torch.float32
    output = torch.empty(plan.parts, R, width, dtype=dtype, device=rows.device)
    share = -(-fan_in // (plan.parts * plan.block_in)) * plan.block_in
    block_rows = min(plan.block_rows, max(16, 1 << (R - 1).bit_length()))
    gpu_kernels.multiply_rows[(*grid, -(-R // block_rows))](
        rows, weights[0], weights[-1], held, output, R, fan_in, fan_out, share,
        HAS_BIAS=bias is not None and plan.parts == 1,
        BLOCK_R=block_rows, BLOCK_O=plan.block_out, BLOCK_I=plan.block_in, **options,
    )  # fmt: skip
    return output[0] if plan.parts == 1 else output


def find_plan(
    rows: int, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, *, is_taken_in: bool = True
) -> ProductPlan:
    """The fastest plan for products of so many rows with weights [fan_in, fan_out] of one shape; measured once a shape.

    Args:
        rows: R.
        weights: of one shape; as many are timed in turn as exceed a card's cache.
        bias: of one of them, or None.
        is_taken_in: whether what reads the product adds its parts up as it reads; otherwise that is a launch more.
    """
    return _find_fastest(rows, [(weight,) for weight in weights], bias, is_taken_in=is_taken_in)[0]


def find_pair_plan(rows: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ProductPlan | None:
    """The fastest plan for two weights of one shape at a time; None where one after the other is faster.

    Args:
        rows: R.
        pairs: weights [fan_in, fan_out] that are multiplied with the same rows, without a bias.
    """
    one = _find_fastest(rows, [(weight,) for pair in pairs for weight in pair], None, is_taken_in=True)
    plan, time_ms = _find_fastest(rows, pairs, None, is_taken_in=True)
    return plan if time_ms < 2 * one[1] else None


def _find_fastest(
    rows: int, weights: Sequence[tuple[torch.Tensor, ...]], bias: torch.Tensor | None, *, is_taken_in: bool
) -> tuple[ProductPlan, float]:
    """The fastest plan and its milliseconds for weights, or pairs of weights, of one shape."""
    first = weights[0][0]
    is_pair = len(weights[0]) == 2
    key = (rows, tuple(first.shape), first.dtype, bias is None, is_pair, is_taken_in, first.device)
    if key not in _plans:
        size = first.numel() * first.element_size()
        chosen = list(weights[: max(1, -(-TIMED_BYTES // (len(weights[0]) * size)))])
        given = torch.randn(rows, first.shape[0], dtype=first.dtype, device=first.device)
        several = (*ROWS_PLANS, *SMALL_PLANS) if size <= SMALL_BYTES else ROWS_PLANS
        plans = ROW_PLANS if rows == 1 else several
        times = {} if is_pair else {LIBRARY: time_plan(given, chosen, bias, LIBRARY)}
        for plan in plans:
            if plan.parts > 1 and plan.parts * plan.block_in > first.shape[0]:
                continue
            launch_ms = 0.0 if is_taken_in or plan.parts == 1 else LAUNCH_MS
            times[plan] = time_plan(given, chosen, bias, plan) + launch_ms
        fastest = min(times, key=times.__getitem__)
        _plans[key] = fastest, times[fastest]
    return _plans[key]


def time_plan(
    rows: torch.Tensor, weights: Sequence[tuple[torch.Tensor, ...]], bias: torch.Tensor | None, plan: ProductPlan
) -> float:
    """Milliseconds of one product on a GPU, median of several runs over all weights; infinite where it cannot run.

    Weights come alone or in pairs. The reading of parts, which whatever takes the product in adds up, is counted.
    """

    def run() -> None:
        for held in weights:
            multiply(rows, held[0], bias, plan, *held[1:])

    try:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(max(1, 8 // len(weights))):
                run()
    except Exception as error:  # too much shared memory for this card, or a compiler's own fault
        torch.cuda.synchronize()
        if plan == LIBRARY:
            raise
        _LOG.debug("product plan %s cannot run: %s", plan, error)
        return float("inf")
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    outputs = sum(weight.shape[1] for weight in weights[0])
    adding = 0.0 if plan.parts == 1 else 4e3 * plan.parts * len(rows) * outputs / BYTES_PER_SECOND
    return statistics.median(times[2:]) / (len(weights) * max(1, 8 // len(weights))) + adding


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
    block_query = 16 if G * N <= 16 else 32 if G * N <= 32 or B * K * G * N < 64 * PROGRAMS else 64
    block_dim = max(16, 1 << (D - 1).bit_length())
    programs = B * K * -(-(G * N) // block_query)
    parts = max(1, min(-(-PROGRAMS // programs), -(-end // KEY_BLOCK)))
    share = -(-end // (parts * KEY_BLOCK)) * KEY_BLOCK
    parts = -(-end // share)
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
        G=G, BIAS=kind, IS_WHOLE=parts == 1, BLOCK_Q=block_query, BLOCK_C=KEY_BLOCK, BLOCK_D=block_dim,
        num_warps=4, num_stages=2,
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
    gpu_kernels.store_rows[(B * N,)](
        layer, pasts, keys, values, N, K, D,
        layer.stride(0), layer.stride(1), layer.stride(2), layer.stride(3), *keys.stride()[:3], *values.stride()[:3],
        BLOCK=min(1024, 1 << (K * D - 1).bit_length()),
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
    R, chunks = rows.shape[0], -(-length // SEARCH_BLOCK)

    def search(
        given: torch.Tensor, places: torch.Tensor, length: int, chunks: int, block: int, *, is_second: bool
    ) -> tuple:
        values = torch.empty(R, chunks * count, dtype=rows.dtype, device=rows.device)
        found = torch.empty(R, chunks * count, dtype=torch.int64, device=rows.device)
        gpu_kernels.find_largest[(R, chunks)](
            given, places, values, found, length, chunks, HAS_INDICES=is_second, COUNT=count, BLOCK=block, num_warps=8
        )
        return values, found

    values, found = search(rows, rows, length, chunks, SEARCH_BLOCK, is_second=False)
    if chunks > 1:
        block = 1 << (chunks * count - 1).bit_length()
        values, found = search(values, found, chunks * count, 1, block, is_second=True)
    return values.view(*shape, count), found.view(*shape, count)
