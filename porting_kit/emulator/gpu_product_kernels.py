"""Triton kernels of products of few rows; R rows. Halves are multiplied and summed in float32 and rounded once."""

from __future__ import annotations

from porting_kit.emulator.triton_import import jit, tl


@jit
def multiply_row(
    rows,
    weight,
    second,
    bias,
    skip,
    output,
    fan_in,
    fan_out,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_PAIR: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One row [fan_in] times a weight [fan_out, fan_in] -> [fan_out]; the weight is streamed once.

    With IS_PAIR a second weight of the same shape follows the first, [2 * fan_out]. With HAS_SKIP nothing is read or
    written where the int32 at `skip` is not 0.
    """
    if HAS_SKIP:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(skip) != 0:
            return
    block, shift = tl.program_id(0), 0
    if IS_PAIR:
        blocks = tl.num_programs(0) // 2
        shift = block // blocks * fan_out
        weight = tl.where(block < blocks, weight, second)
        block = block % blocks
    out = block * BLOCK_O + tl.arange(0, BLOCK_O)
    start = weight + out.to(tl.int64)[:, None] * fan_in
    total = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
    for first in range(0, fan_in, BLOCK_I):
        column = first + tl.arange(0, BLOCK_I)
        values = tl.load(
            start + column[None, :],
            mask=(out[:, None] < fan_out) & (column[None, :] < fan_in),
            other=0.0,
            eviction_policy="evict_first",
        )
        row = tl.load(rows + column, mask=column < fan_in, other=0.0)
        total += values.to(tl.float32) * row.to(tl.float32)[None, :]
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + out, mask=out < fan_out, other=0.0).to(tl.float32)
    tl.store(output + shift + out, result.to(output.dtype.element_ty), mask=out < fan_out)


@jit
def multiply_rows(
    rows,
    weight,
    second,
    bias,
    skip,
    output,
    R,
    fan_in,
    fan_out,
    share,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_PAIR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Rows [R, fan_in] times a weight [fan_out, fan_in] -> [parts, R, fan_out]; a part sums `share` columns.

    Program: (block of outputs, part, block of rows); with all rows in one block the weight is read once. With IS_PAIR a
    second weight of the same shape follows the first, [parts, R, 2 * fan_out].

    The weight's rows take the long side of the tensor cores, so that few rows waste little. HAS_SKIP: `multiply_row`.
    """
    if HAS_SKIP:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(skip) != 0:
            return
    block, shift, width = tl.program_id(0), 0, fan_out
    if IS_PAIR:
        blocks = tl.num_programs(0) // 2
        shift, width = block // blocks * fan_out, 2 * fan_out
        weight = tl.where(block < blocks, weight, second)
        block = block % blocks
    out = block * BLOCK_O + tl.arange(0, BLOCK_O)
    part = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
    start = weight + out.to(tl.int64)[:, None] * fan_in
    end = tl.minimum((part + 1) * share, fan_in)
    for first in range(part * share, end, BLOCK_I):
        column = first + tl.arange(0, BLOCK_I)
        values = tl.load(
            start + column[None, :],
            mask=(out[:, None] < fan_out) & (column[None, :] < end),
            other=0.0,
            eviction_policy="evict_first",
        )
        inputs = tl.load(
            rows + row[None, :] * fan_in + column[:, None], mask=(row[None, :] < R) & (column[:, None] < end), other=0.0
        )
        total = tl.dot(values, inputs, total)
    if HAS_BIAS:
        total += tl.load(bias + out, mask=out < fan_out, other=0.0).to(tl.float32)[:, None]
    place = output + (part * R + row[None, :]).to(tl.int64) * width + shift + out[:, None]
    tl.store(place, total.to(output.dtype.element_ty), mask=(out[:, None] < fan_out) & (row[None, :] < R))


@jit
def stream_rows(
    rows,
    weight,
    bias,
    skip,
    output,
    R,
    fan_out,
    steps,
    tiles,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """What `multiply_rows` gives for all rows in one block, from tensor descriptors of the rows and of the weight.

    Program: (first of its tiles of outputs, part of `steps` blocks of inputs). Tiles come in turn, so that the copy
    engine fetches the next one's weights while this one is written; beyond the edges it gives zeros.
    """
    if HAS_SKIP:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(skip) != 0:
            return
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_R)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        total = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
        for step in range(steps):
            first = (part * steps + step) * BLOCK_I
            total = tl.dot(weight.load([tile * BLOCK_O, first]), rows.load([0, first]).T, total)
        out = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        if HAS_BIAS:
            total += tl.load(bias + out, mask=out < fan_out, other=0.0).to(tl.float32)[:, None]
        place = output + (part * R + row[None, :]).to(tl.int64) * fan_out + out[:, None]
        tl.store(place, total.to(output.dtype.element_ty), mask=(out[:, None] < fan_out) & (row[None, :] < R))
