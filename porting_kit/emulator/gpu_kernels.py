"""Triton kernels of a decode step: attention of few queries over a cache, new and moved rows of it, searches.

Letters are the package's; G query heads of a group. Halves are multiplied and summed in float32 and rounded once.
"""

from __future__ import annotations

from porting_kit.emulator.triton_import import jit, tl


@jit
def attend(
    query,
    keys,
    values,
    bias,
    output,
    top,
    weight_sum,
    scale,
    softcap,
    H,
    N,
    D,
    end,
    share,
    query_b,
    query_h,
    query_n,
    cache_b,
    cache_k,
    cache_row,
    bias_b,
    bias_h,
    bias_n,
    G: tl.constexpr,
    BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """softmax(scale q.k + bias) v of one group's queries over one share of the cache rows.

    Program: (request and key/value head, block of the group's G * N queries, part of the rows). Leaves the undivided
    sum [parts, B, N, H, D], the largest logit and the sum of weights [parts, B, N, H], all float32, for `join_parts`.
    BIAS: 0 none, 1 bytes that say whether a key is seen, 2 float32 added to the logit. softcap 0 is none.
    """
    K = H // G
    request, group = tl.program_id(0) // K, tl.program_id(0) % K
    part = tl.program_id(2)
    which = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = which < G * N
    head, node = group * G + which // N, which % N
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < D
    q = tl.load(
        query + request * query_b + (head * query_h + node * query_n)[:, None] + dim[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )
    cache = request.to(tl.int64) * cache_b + group.to(tl.int64) * cache_k
    best = tl.full([BLOCK_Q], -1e30, dtype=tl.float32)
    weights = tl.zeros([BLOCK_Q], dtype=tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    last = tl.minimum((part + 1) * share, end)
    for first in range(part * share, last, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        is_column = column < last
        place = cache + column[:, None] * cache_row + dim[None, :]
        is_place = is_column[:, None] & is_dim[None, :]
        k = tl.load(keys + place, mask=is_place, other=0.0)
        v = tl.load(values + place, mask=is_place, other=0.0)
        seen = is_query[:, None] & is_column[None, :]
        if BIAS > 0:
            where = bias + request * bias_b + (head * bias_h + node * bias_n)[:, None] + column[None, :]
            given = tl.load(where, mask=seen, other=0)
        logit = tl.dot(q, tl.trans(k)) * scale
        if softcap > 0:
            # tanh through exp of a number that is not positive
            ratio = tl.exp(-2.0 * tl.abs(logit) / softcap)
            size = softcap * (1.0 - ratio) / (1.0 + ratio)
            logit = tl.where(logit < 0, -size, size)
        if BIAS == 1:
            seen = seen & (given != 0)
        elif BIAS == 2:
            logit += given
        logit = tl.where(seen, logit, -1e30)
        new = tl.maximum(best, tl.max(logit, axis=1))
        shrink = tl.exp(best - new)
        p = tl.where(logit > -1e29, tl.exp(logit - new[:, None]), 0.0)
        weights = weights * shrink + tl.sum(p, axis=1)
        # Two halves of a weight keep what one would round away.
        coarse = p.to(v.dtype)
        total = total * shrink[:, None] + tl.dot(coarse, v)
        total += tl.dot((p - coarse.to(tl.float32)).to(v.dtype), v)
        best = new
    is_cell = is_query[:, None] & is_dim[None, :]
    if IS_WHOLE:
        # one part: the rows as the caller wants them, [B, N, H, D]
        place = (request * N + node) * H + head
        tl.store(output + place[:, None] * D + dim[None, :], (total / weights[:, None]).to(q.dtype), mask=is_cell)
    else:
        place = ((part * (tl.num_programs(0) // K) + request) * N + node) * H + head
        tl.store(output + place[:, None] * D + dim[None, :], total, mask=is_cell)
        tl.store(top + place, best, mask=is_query)
        tl.store(weight_sum + place, weights, mask=is_query)


@jit
def join_parts(
    parts, top, weight_sum, output, rows, D, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Parts of an attention [parts, rows, D] with their largest logits and sums of weights -> [rows, D]."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK_P)
    dim = tl.arange(0, BLOCK_D)
    best = tl.load(top + part * rows + row, mask=part < PARTS, other=-1e30)
    factor = tl.exp(best - tl.max(best, axis=0))
    weight = tl.load(weight_sum + part * rows + row, mask=part < PARTS, other=0.0)
    cell = (part[:, None] < PARTS) & (dim[None, :] < D)
    values = tl.load(parts + (part * rows + row)[:, None] * D + dim[None, :], mask=cell, other=0.0)
    total = tl.sum(values * factor[:, None], axis=0) / tl.sum(weight * factor, axis=0)
    tl.store(output + row * D + dim, total.to(output.dtype.element_ty), mask=dim < D)


@jit
def store_rows(
    layer,
    pasts,
    keys,
    values,
    N,
    K,
    D,
    layer_b,
    layer_kind,
    layer_k,
    layer_row,
    new_b,
    new_n,
    new_k,
    value_b,
    value_n,
    value_k,
    BLOCK: tl.constexpr,
):
    """Keys and values [B, N, K, D] into rows past + n of a cache [B, 2, K, capacity, D].

    Program: (request and n, block of elements of the row).
    """
    request, node = tl.program_id(0) // N, tl.program_id(0) % N
    row = tl.load(pasts + request) + node
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < K * D
    head, dim = element // D, element % D
    target = request.to(tl.int64) * layer_b + head * layer_k + row * layer_row + dim
    k = tl.load(keys + request * new_b + node * new_n + head * new_k + dim, mask=is_element)
    tl.store(layer + target, k, mask=is_element)
    v = tl.load(values + request * value_b + node * value_n + head * value_k + dim, mask=is_element)
    tl.store(layer + target + layer_kind, v, mask=is_element)


@jit
def move_rows(
    joined,
    rows,
    pasts,
    A,
    D,
    of_request,
    joined_l,
    joined_b,
    joined_k,
    joined_row,
    B,
    HEADS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Row past + rows[b, i] to past + i in every layer of a cache [layers, B, 2, K, capacity, D]; -1 moves nothing.

    Program: (layer, request, keys or values of a head). One warp reads all rows before it writes one.
    """
    program = tl.program_id(0)
    head, request, layer = program % HEADS, program // HEADS % B, program // (HEADS * B)
    step = tl.arange(0, BLOCK_A)
    dim = tl.arange(0, BLOCK_D)
    row = tl.load(rows + request * of_request + step, mask=step < A, other=-1)
    past = tl.load(pasts + request)
    is_moved = (row >= 0) & (row != step)
    base = joined + layer.to(tl.int64) * joined_l + request.to(tl.int64) * joined_b + head * joined_k
    cell = is_moved[:, None] & (dim[None, :] < D)
    values = tl.load(base + (past + row)[:, None] * joined_row + dim[None, :], mask=cell)
    tl.debug_barrier()
    tl.store(base + (past + step)[:, None] * joined_row + dim[None, :], values, mask=cell)


@jit
def find_largest(
    rows,
    indices,
    values,
    positions,
    length,
    chunks,
    HAS_INDICES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE_BITS: tl.constexpr,
):
    """The COUNT largest of each chunk of BLOCK halves, in order, of equals the first: [rows, chunks * COUNT].

    With HAS_INDICES the rows are such results, and the positions are looked up in theirs.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    place = chunk * BLOCK + within
    start = row.to(tl.int64) * length
    element = tl.load(rows + start + place, mask=place < length, other=float("-inf"))
    # A half as an integer of the same order, and behind it the place, the first one largest: no two keys are equal.
    bits = tl.where(element == 0, 0.0, element).to(element.dtype).to(tl.int16, bitcast=True).to(tl.int32)
    key = ((bits ^ ((bits >> 31) & 0x7FFF)) << PLACE_BITS) | ((1 << PLACE_BITS) - 1 - within)
    for rank in range(COUNT):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, -(1 << 31), key)
        found = tl.minimum(chunk * BLOCK + (1 << PLACE_BITS) - 1 - (best & ((1 << PLACE_BITS) - 1)), length - 1)
        if HAS_INDICES:
            found = tl.load(indices + start + found)
        half = best >> PLACE_BITS
        value = (half ^ ((half >> 31) & 0x7FFF)).to(tl.int16).to(values.dtype.element_ty, bitcast=True)
        target = (row * chunks + chunk) * COUNT + rank
        tl.store(values + target, value)
        tl.store(positions + target, found.to(tl.int64))
