"""Functions that the attention kernels share: an online softmax over tiles of the paged cache, and the merge of two
softmax states.

The state of a softmax, for each row (one head of one query), in base 2:

    peak   the highest score so far, or LOWEST
    total  the sum of 2^(score - peak)
    mixed  the sum of 2^(score - peak) * value

The score of a position that the row does not see is minus infinity. LOWEST is finite, so the state of a row that has
seen nothing stays free of NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import dot

LOWEST: tl.constexpr = tl.constexpr(-1e30)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The initial state of a softmax: no position was added."""
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def full_begin_of(position, BLOCK_SIZE: tl.constexpr, TAIL_BLOCKS: tl.constexpr):
    """With a two-tier cache: a query at `position` reads all positions before the returned one from the store."""
    return tl.maximum((position + 1) // BLOCK_SIZE - TAIL_BLOCKS, 0) * BLOCK_SIZE


@triton.jit
def attend(
    query,  # [ROWS, WIDTH]
    positions,  # [ROWS]: a row sees positions up to its own, within its window
    peak,
    total,
    mixed,
    begin,  # a multiple of TILE
    end,
    full_from,  # TIERED: [ROWS], first position that each row reads in full precision
    full_begin,  # TIERED: the lowest of `full_from`
    keys,  # address of K of the layer and head in block 0
    table,  # block table of the request
    scale,
    score_cap,
    MASKED: tl.constexpr,  # False: every row sees all of begin to end
    TIERED: tl.constexpr,  # True: earlier blocks are in the store
    WINDOW: tl.constexpr,  # 0: no window
    CAPPED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= HEAD_SIZE
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,  # from K to V
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds the positions begin to end to the softmax, one tile at a time."""
    column = tl.arange(0, WIDTH)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place = start + tl.arange(0, TILE)
        if MASKED:
            # Past the end, the block table has no valid entries, and a block may hold NaN.
            is_there = place < end
            if TIERED:
                is_there = is_there & (place >= full_begin)
            block = tl.load(table + place // BLOCK_SIZE, mask=is_there, other=0)
        else:
            block = tl.load(table + place // BLOCK_SIZE)
        cell = keys + block.to(tl.int64)[:, None] * BLOCK_STRIDE + (place % BLOCK_SIZE)[:, None] * HEAD_SIZE
        address = cell + column[None, :]
        if MASKED:
            there = is_there[:, None] & (column < HEAD_SIZE)[None, :]
            key = tl.load(address, mask=there, other=0.0)
            value = tl.load(address + VALUE_OFFSET, mask=there, other=0.0)
        elif HEAD_SIZE != WIDTH:
            there = (column < HEAD_SIZE)[None, :]
            key = tl.load(address, mask=there, other=0.0)
            value = tl.load(address + VALUE_OFFSET, mask=there, other=0.0)
        else:
            key = tl.load(address)
            value = tl.load(address + VALUE_OFFSET)

        peak, total, mixed = _attend_to_tile(
            query,
            positions,
            peak,
            total,
            mixed,
            key,
            value,
            place,
            end,
            full_from,
            scale,
            score_cap,
            MASKED,
            TIERED,
            WINDOW,
            CAPPED,
        )
    return peak, total, mixed


@triton.jit
def attend_to_rows(
    query,
    positions,
    peak,
    total,
    mixed,
    begin,
    end,
    qkv,  # tensor descriptor of the step's rows; a tile is TILE tokens of one head
    first_token,  # token at position 0 of the request
    key_column,
    value_column,
    scale,
    score_cap,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `attend`, for a request with its whole context in the step: K and V are read from the rows after RoPE."""
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place = start + tl.arange(0, TILE)
        key = qkv.load([first_token + start, key_column])
        value = qkv.load([first_token + start, value_column])
        if MASKED:
            # Rows past the end belong to another request and may be NaN.
            value = tl.where((place < end)[:, None], value, 0.0)
        peak, total, mixed = _attend_to_tile(
            query,
            positions,
            peak,
            total,
            mixed,
            key,
            value,
            place,
            end,
            positions,
            scale,
            score_cap,
            MASKED,
            False,
            WINDOW,
            CAPPED,
        )
    return peak, total, mixed


@triton.jit
def _attend_to_tile(
    query,
    positions,
    peak,
    total,
    mixed,
    key,  # [TILE, WIDTH]
    value,
    place,  # [TILE]
    end,
    full_from,
    scale,
    score_cap,
    MASKED: tl.constexpr,
    TIERED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Adds one tile of keys and values to the softmax."""
    scores = dot(query, tl.trans(key), tl.zeros((query.shape[0], key.shape[0]), tl.float32))
    scores, factor = exponents(scores, scale, score_cap, CAPPED)
    if MASKED:
        seen = (place[None, :] <= positions[:, None]) & (place < end)[None, :]
        if WINDOW > 0:
            seen = seen & (place[None, :] > positions[:, None] - WINDOW)
        if TIERED:
            seen = seen & (place[None, :] >= full_from[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - highest[:, None])
    shrink = tl.exp2(peak - highest)
    total = total * shrink + tl.sum(weights, 1)
    mixed = dot(weights.to(value.dtype), value, mixed * shrink[:, None])
    return highest, total, mixed


@triton.jit
def exponents(scores, scale, score_cap, CAPPED: tl.constexpr):
    """Turns products of queries and keys into scores. Returns the scores, and the factor by which they must be
    multiplied to be exponents of 2."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        power = tl.exp2(scores * (scale / score_cap * (2.0 * _LOG2_E)))
        scores = score_cap * (1.0 - 2.0 / (power + 1.0))
        factor = _LOG2_E
    else:
        factor = scale * _LOG2_E
    return scores, factor


@triton.jit
def joined(peak, total, mixed, other_peak, other_total, other_mixed):
    """Merges two softmax states. The explicit fma calls fix which product is rounded. Otherwise the compiler could
    choose differently in each kernel, and the invariant mode needs the same rounding in all of them."""
    highest = tl.maximum(peak, other_peak)
    shrink = tl.exp2(peak - highest)
    other_shrink = tl.exp2(other_peak - highest)
    total = tl.fma(total, shrink, other_total * other_shrink)
    wide_shrink = tl.broadcast_to(shrink[:, None], mixed.shape)
    mixed = tl.fma(mixed, wide_shrink, other_mixed * other_shrink[:, None])
    return highest, total, mixed


@triton.jit
def mean(total, mixed):
    """The result of attention: the weighted mean of the values, or 0 if nothing was seen."""
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]
