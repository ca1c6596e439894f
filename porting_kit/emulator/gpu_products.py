"""Products of few half-precision rows on a GPU: which kernel serves a shape, measured on the model's own weights.

PyTorch's own product is always among the candidates.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from porting_kit.emulator import gpu_product_kernels
from porting_kit.emulator.gpu_operations import PROGRAMS
from porting_kit.emulator.triton_import import TensorDescriptor

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
        kind: "library" is PyTorch's own, "row" the kernel for one row, "rows" the one for several, "stream" the one for
            several whose programs stay and fetch through the copy engine of a card that has one.
        block_out, block_in: outputs and inputs of one tile.
        parts: parts of the sum over the inputs, added up by the caller.
        warps, stages: of the kernel.
        block_rows: rows of one tile at most; fewer than all read the weight several times, which is fast where a card's
            cache holds it.
        resident: programs of "stream" that a processor holds at a time.
    """

    kind: str
    block_out: int = 0
    block_in: int = 0
    parts: int = 1
    warps: int = 4
    stages: int = 3
    block_rows: int = MAX_ROWS
    resident: int = 1


LIBRARY = ProductPlan("library")
_ROW_TILES = ((4, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 1024, 8), (2, 2048, 4), (1, 2048, 4))
_ROWS_TILES = ((32, 128, 4, 4), (64, 64, 5, 4), (64, 128, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8))
ROW_PLANS = tuple(ProductPlan("row", block_out, block_in, warps=warps) for block_out, block_in, warps in _ROW_TILES)
ROWS_PLANS = tuple(
    ProductPlan("rows", block_out, block_in, parts, warps, stages)
    for block_out, block_in, stages, warps in _ROWS_TILES
    for parts in (1, 2, 4)
)
# Two stages more than fit 64 rows do not compile for 128; the timing passes over what cannot run.
_STREAM_TILES = ((128, 128, 4, 1), (128, 128, 3, 1), (128, 64, 6, 1), (64, 128, 4, 2))
STREAM_PLANS = tuple(
    ProductPlan("stream", block_out, block_in, parts, 4, stages, resident=resident)
    for block_out, block_in, stages, resident in _STREAM_TILES
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
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows [R, fan_in] times weight [fan_in, fan_out], whose transpose is contiguous, plus bias [fan_out].

    Args:
        second: a weight like the first, whose product follows the first one's in each row; only without a bias, and
            for the plans "row" and "rows".
        skip: int32 [1] on the device; where it is not 0 nothing is computed, and the result holds anything. Not for
            the plan "library".

    Returns:
        [R, fan_out] in the type of the rows, [R, 2 * fan_out] with a second weight; with several parts float32
        [parts, R, ...], to be summed.
    """
    if plan.kind == "library":
        return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    weights = (weight,) if second is None else (weight, second)
    rows = rows.contiguous()
    (R, fan_in), fan_out = rows.shape, weight.shape[1]
    dtype = rows.dtype if plan.parts == 1 else torch.float32
    output = torch.empty(plan.parts, R, len(weights) * fan_out, dtype=dtype, device=rows.device)
    held = tuple(rows if given is None else given for given in (bias, skip))
    tiles = -(-fan_out // plan.block_out)
    steps = -(-fan_in // (plan.parts * plan.block_in))
    options = {
        "HAS_BIAS": bias is not None and plan.parts == 1,
        "HAS_SKIP": skip is not None,
        "BLOCK_O": plan.block_out,
        "BLOCK_I": plan.block_in,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    block_rows = min(plan.block_rows, max(16, 1 << (R - 1).bit_length()))
    if plan.kind == "row":
        gpu_product_kernels.multiply_row[(len(weights) * tiles,)](
            rows, weights[0], weights[-1], *held, output, fan_in, fan_out, IS_PAIR=second is not None, **options
        )
    elif plan.kind == "rows":
        gpu_product_kernels.multiply_rows[(len(weights) * tiles, plan.parts, -(-R // block_rows))](
            rows, weights[0], weights[-1], *held, output, R, fan_in, fan_out, steps * plan.block_in,
            IS_PAIR=second is not None, BLOCK_R=block_rows, **options,
        )  # fmt: skip
    else:
        described = TensorDescriptor.from_tensor(rows, [block_rows, plan.block_in])
        streamed = TensorDescriptor.from_tensor(weight.T, [plan.block_out, plan.block_in])
        programs = min(tiles, max(1, PROGRAMS * plan.resident // plan.parts))
        gpu_product_kernels.stream_rows[(programs, plan.parts)](
            described, streamed, *held, output, R, fan_out, steps, tiles, BLOCK_R=block_rows, **options
        )
    return output[0] if plan.parts == 1 else output


def find_plan(
    rows: int,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    is_taken_in: bool = True,
    has_library: bool = True,
) -> ProductPlan:
    """The fastest plan for products of so many rows with weights [fan_in, fan_out] of one shape; measured once a shape.

    Args:
        rows: R.
        weights: of one shape; as many are timed in turn as exceed a card's cache.
        bias: of one of them, or None.
        is_taken_in: whether what reads the product adds its parts up as it reads; otherwise that is a launch more.
        has_library: whether PyTorch's own product is a candidate.
    """
    of_one = [(weight,) for weight in weights]
    return _find_fastest(rows, of_one, bias, is_taken_in=is_taken_in, has_library=has_library)[0]


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
    rows: int,
    weights: Sequence[tuple[torch.Tensor, ...]],
    bias: torch.Tensor | None,
    *,
    is_taken_in: bool,
    has_library: bool = True,
) -> tuple[ProductPlan, float]:
    """The fastest plan and its milliseconds for weights, or pairs of weights, of one shape."""
    first = weights[0][0]
    is_pair = len(weights[0]) == 2
    key = (rows, tuple(first.shape), first.dtype, bias is None, is_pair, is_taken_in, has_library, first.device)
    if key not in _plans:
        size = first.numel() * first.element_size()
        chosen = list(weights[: max(1, -(-TIMED_BYTES // (len(weights[0]) * size)))])
        given = torch.randn(rows, first.shape[0], dtype=first.dtype, device=first.device)
        streamed = () if is_pair or TensorDescriptor is None else STREAM_PLANS
        several = (*ROWS_PLANS, *(SMALL_PLANS if size <= SMALL_BYTES else streamed))
        plans = ROW_PLANS if rows == 1 else several
        times = {} if is_pair or not has_library else {LIBRARY: time_plan(given, chosen, bias, LIBRARY)}
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
