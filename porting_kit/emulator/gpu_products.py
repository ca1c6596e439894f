"""Products of few half-precision rows on a GPU: which kernel serves a shape, measured on the model's own weights.

PyTorch's own product is always among the candidates.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from porting_kit.emulator import gpu_kernels

MAX_ROWS = 128
"""Rows of a product that the kernels take; more are a matter of arithmetic, where the library is best."""

BYTES_PER_SECOND = 3e12
"""At which parts of a product are assumed to be read again."""

LAUNCH_MS = 1.5e-3
"""Of a small kernel in a captured step: parts that are added up by themselves (measured on an H200)."""

TIMED_BYTES = 256 << 20
"""Weights that a plan is timed on in turn: more than a card's cache, so that they come from memory as in a step."""


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
