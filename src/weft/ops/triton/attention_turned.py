"""Rope and attention of requests with one token each in one launch: for small batches, where launches are what costs.

It differs from the two kernels one after the other in what it waits for: K and V of earlier steps are read while the
product in front still runs, and the token's own K and V come from that product, not from the cache. So no request may
read what another one's token of this step fills (`DeviceBatch.settled`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_decode import finish_split
from weft.ops.triton.attention_tiles import attend, attend_to_tile, capped, nothing_seen
from weft.ops.triton.device import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["layer", "table_stride", "smallest_split"])
def turned_attention(
    qkv,  # [requests, QUERY_STRIDE]
    output,  # [requests, heads * head size]
    cache,
    tables,
    rows,
    context_lengths,
    cells,
    angles,
    query_norm,
    key_norm,
    split_mixed,
    split_peaks,
    split_totals,
    arrivals,
    layer,
    table_stride,
    smallest_split,
    scale,
    score_cap,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    BLOCK_STRIDE: tl.constexpr = LAYERS * 2 * VALUE_OFFSET

    # --- before the product in front has ended: everything but its rows ---
    context = tl.load(context_lengths + request)
    table = tables + tl.load(rows + request).to(tl.int64) * table_stride
    cell = tl.load(cells + request)
    first_seen = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    first_split = first_seen // TILE * TILE
    even = tl.cdiv(tl.cdiv(context - first_split, tl.num_programs(1)), TILE) * TILE
    split_size = tl.maximum(smallest_split, even)
    splits = tl.maximum(tl.cdiv(context - first_split, split_size), 1)
    begin = first_split + split * split_size
    end = tl.minimum(begin + split_size, context - 1)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    keys = cache + (layer * 2 * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE)
    place = begin + tl.arange(0, TILE)
    block = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)
    address = keys + (block * BLOCK_STRIDE + place % BLOCK_SIZE * HEAD_SIZE)[:, None] + column[None, :]
    there = (place < end)[:, None] & (column < HEAD_SIZE)[None, :]
    key = tl.load(address, mask=there, other=0.0)
    value = tl.load(address + VALUE_OFFSET, mask=there, other=0.0)

    # A feature becomes itself times the cosine plus its partner times the sine, which has its sign for the pair's left.
    turns = column < 2 * PAIRS
    if INTERLEAVED:
        pair = column // 2
        is_left = column % 2 == 0
        partner = tl.where(is_left, column + 1, column - 1)
    else:
        is_left = column < PAIRS
        pair = tl.where(is_left, column, column - PAIRS)
        partner = tl.where(is_left, column + PAIRS, column - PAIRS)
    partner = tl.where(turns, partner, column)
    angle = angles + tl.maximum(context - 1, 0).to(tl.int64) * (2 * PAIRS) + pair
    cosine = tl.load(angle, mask=turns, other=1.0)
    sine = tl.load(angle + PAIRS, mask=turns, other=0.0)
    sine = tl.where(is_left, -sine, sine)

    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    if split >= splits:
        return

    token_row = qkv + request.to(tl.int64) * QUERY_STRIDE
    in_head = column < HEAD_SIZE
    query = _turned(
        token_row + (kv_head * GROUP + row)[:, None] * HEAD_SIZE,
        (row < GROUP)[:, None] & in_head[None, :],
        column[None, :],
        partner[None, :],
        cosine[None, :],
        sine[None, :],
        query_norm,
        epsilon,
        NORMED,
        HEAD_SIZE,
    ).to(cache.dtype.element_ty)
    own = tl.arange(0, 1)
    own_key = _turned(
        token_row + (HEADS + kv_head + own)[:, None] * HEAD_SIZE,
        (own == 0)[:, None] & in_head[None, :],
        column[None, :],
        partner[None, :],
        cosine[None, :],
        sine[None, :],
        key_norm,
        epsilon,
        NORMED,
        HEAD_SIZE,
    ).to(cache.dtype.element_ty)
    value_row = token_row + (HEADS + KV_HEADS + kv_head + own)[:, None] * HEAD_SIZE
    own_value = tl.load(value_row + column[None, :], mask=in_head[None, :], other=0.0)

    # The last split has the token itself: its softmax begins with it.
    peak, total, mixed = nothing_seen(ROWS, WIDTH)
    is_last = (split == splits - 1) & (context > 0)
    score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32), 1)
    score, factor = capped(score, scale, score_cap, CAPPED)
    peak = tl.where(is_last, score * factor, peak)
    total = tl.where(is_last, total + 1.0, total)
    mixed = tl.where(is_last, mixed + own_value.to(tl.float32), mixed)
    target = keys + (cell // BLOCK_SIZE) * BLOCK_STRIDE + (cell % BLOCK_SIZE) * HEAD_SIZE + column[None, :]
    written = in_head[None, :] & is_last
    tl.store(target, own_key, mask=written)
    tl.store(target + VALUE_OFFSET, own_value.to(cache.dtype.element_ty), mask=written)

    positions = tl.full((ROWS,), 0, tl.int32) + (context - 1)
    peak, total, mixed = attend_to_tile(
        query, positions, peak, total, mixed, key, value, place, end, scale, score_cap, True, WINDOW, CAPPED
    )
    peak, total, mixed = attend(
        query,
        positions,
        peak,
        total,
        mixed,
        begin + TILE,
        end,
        keys,
        table,
        scale,
        score_cap,
        MASKED=True,
        WINDOW=WINDOW,
        CAPPED=CAPPED,
        HEAD_SIZE=HEAD_SIZE,
        WIDTH=WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_STRIDE=BLOCK_STRIDE,
        VALUE_OFFSET=VALUE_OFFSET,
        TILE=TILE,
        STAGES=STAGES,
    )
    finish_split(
        peak,
        total,
        mixed,
        output + request.to(tl.int64) * (HEADS * HEAD_SIZE) + kv_head * (GROUP * HEAD_SIZE),
        split_mixed,
        split_peaks,
        split_totals,
        arrivals,
        request * KV_HEADS + kv_head,
        split,
        splits,
        GROUP,
        HEAD_SIZE,
        WIDTH,
        ROWS,
        JOINED_ROWS,
        JOINED_AT_ONCE,
    )


@triton.jit
def _turned(
    heads,  # [heads, 1]: where each begins
    there,
    column,
    partner,
    cosine,
    sine,
    norm,
    epsilon,
    NORMED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """float32 [heads, WIDTH]"""
    values = tl.load(heads + column, mask=there, other=0.0).to(tl.float32)
    partners = tl.load(heads + partner, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(values * values, 1) / HEAD_SIZE + epsilon)[:, None]
        values *= factor * tl.load(norm + column, mask=column < HEAD_SIZE, other=0.0).to(tl.float32)
        partners *= factor * tl.load(norm + partner, mask=column < HEAD_SIZE, other=0.0).to(tl.float32)
    return values * cosine + partners * sine
