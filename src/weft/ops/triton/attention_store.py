"""Attention to the quantised blocks of a two-tier cache, tile by tile, without writing out dequantised values.

value = scale * (code - offset). Codes are small integers, exact in any data type. The product of a query with a key is
scale * (query x codes - offset * sum of the query). If keys are rotated, queries are rotated too.

For values, each attention weight is first multiplied by the scale of its value, then by the codes. The offsets of all
values add up to one number per row, which is subtracted from each of its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_tiles import LOWEST, exponents
from weft.ops.triton.device import INTERPRETED, dot
from weft.ops.triton.store import rotated, scale_of


@triton.jit
def load_queries(rows, there, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Loads queries as [features, ROWS], the right operand of products with codes. `rows` are their addresses. Returns
    two tensors and the sum of each query. With 4 bits the two hold the even and the odd features, rotated like keys.
    With 8 bits both hold all features."""
    NEIGHBOURS: tl.constexpr = 8 // BITS
    feature = tl.arange(0, WIDTH // NEIGHBOURS)[:, None] * NEIGHBOURS
    is_feature = there[None, :] & (feature < HEAD_SIZE)
    query = tl.load(rows[None, :] + feature, mask=is_feature, other=0.0)
    other_query = query
    if BITS == 4:
        other_query = tl.load(rows[None, :] + feature + 1, mask=is_feature, other=0.0)
        TYPE: tl.constexpr = query.dtype
        query, other_query = rotated(query.to(tl.float32), other_query.to(tl.float32), HEAD_SIZE)
        query, other_query = query.to(TYPE), other_query.to(TYPE)
    # The sum is computed as a matrix product, because its summation order is the same in every kernel.
    ones = tl.full((16, WIDTH // NEIGHBOURS), 1.0, tl.float32).to(query.dtype)
    sums = dot(ones, query, tl.zeros((16, query.shape[1]), tl.float32))
    if BITS == 4:
        sums = dot(ones, other_query, sums)
    return query, other_query, tl.max(sums, 0)


@triton.jit
def attend_to_store(
    query,  # [WIDTH, ROWS]; with 4 bits [WIDTH / 2, ROWS]: the even features
    other_query,  # 4 bits: the odd features
    query_sum,  # [ROWS]
    positions,  # [ROWS]
    full_from,  # [ROWS]: first position that a row reads in full precision
    begin,  # a multiple of 16
    end,  # end of a block; no row reads later positions from the store
    codes,  # address of this layer and head in block 0 of the store
    words,
    table,  # store table of the request
    scale,
    score_cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # bytes of a block
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the softmax over the positions begin to end that each row sees in the store.

    Codes are the left operand of all products, because tensor cores take a left operand directly from registers. So the
    rows of a tile are positions, and its columns are query rows.
    """
    ROWS: tl.constexpr = query.shape[1]
    COLUMNS: tl.constexpr = WIDTH * BITS // 8
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    # Sums are kept per position of a tile, and added over positions once, after the last tile: a reduction takes longer
    # than the rest of a tile.
    totals = tl.zeros((TILE, ROWS), tl.float32)
    offset_sums = tl.zeros((TILE, ROWS), tl.float32)
    mixed = tl.zeros((COLUMNS, ROWS), tl.float32)
    other_mixed = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place, key_codes, value_codes, word = _load_tile(
            codes, words, table, start, end, BITS, HEAD_SIZE, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, TILE
        )
        scores = tl.zeros((TILE, ROWS), tl.float32)
        if BITS == 8:
            scores = dot(_numbers(key_codes, query.dtype), query, scores)
        else:
            left, right = _numbers_of_pairs(key_codes, query.dtype)
            scores = dot(left, query, scores)
            scores = dot(right, other_query, scores)
        key_scale, key_offset = scale_of(word & 255), _offset((word << 16) >> 24, query.dtype, BITS)
        against = tl.broadcast_to(-key_offset[:, None], (TILE, ROWS))
        scores = tl.fma(against, tl.broadcast_to(query_sum[None, :], (TILE, ROWS)), scores)
        scores, factor = exponents(scores * key_scale[:, None], scale, score_cap, CAPPED)
        seen = place[:, None] < tl.minimum(full_from, end)[None, :]
        if WINDOW > 0:
            seen = seen & (place[:, None] > positions[None, :] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 0) * factor)
        weights = tl.exp2(scores * factor - highest[None, :])
        shrink = tl.exp2(peak - highest)
        peak = highest

        scaled = (weights * scale_of((word >> 16) & 255)[:, None]).to(query.dtype)
        # The same rounded weights multiply codes and offsets, so that the offsets cancel exactly.
        value_offset = _offset(word >> 24, query.dtype, BITS)
        totals = totals * shrink[None, :] + weights
        offset_sums = offset_sums * shrink[None, :] + scaled.to(tl.float32) * value_offset[:, None]
        if BITS == 8:
            mixed = dot(_numbers(value_codes, query.dtype), scaled, mixed * shrink[None, :])
        else:
            left, right = _numbers_of_pairs(value_codes, query.dtype)
            mixed = dot(left, scaled, mixed * shrink[None, :])
            other_mixed = dot(right, scaled, other_mixed * shrink[None, :])
    total_offset = tl.sum(offset_sums, 0)[:, None]
    mixed = tl.trans(mixed) - total_offset
    if BITS == 4:
        mixed = tl.reshape(tl.join(mixed, tl.trans(other_mixed) - total_offset), (ROWS, WIDTH))
    return peak, tl.sum(totals, 0), mixed


@triton.jit
def attend_to_store_by_rows(
    query,
    other_query,
    query_sum,
    positions,
    full_from,
    begin,
    end,
    codes,
    words,
    table,
    scale,
    score_cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `attend_to_store`, for many query rows. Here the rows of a tile are query rows, and its columns are
    positions. So one thread holds all scores of a query row. A reduction across threads would take longer than the
    products."""
    query, other_query = tl.trans(query), tl.trans(other_query)
    ROWS: tl.constexpr = query.shape[0]
    COLUMNS: tl.constexpr = WIDTH * BITS // 8
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    offset_sums = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place, key_codes, value_codes, word = _load_tile(
            codes, words, table, start, end, BITS, HEAD_SIZE, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, TILE
        )
        scores = tl.zeros((ROWS, TILE), tl.float32)
        if BITS == 8:
            scores = dot(query, tl.trans(_numbers(key_codes, query.dtype)), scores)
        else:
            left, right = _numbers_of_pairs(key_codes, query.dtype)
            scores = dot(query, tl.trans(left), scores)
            scores = dot(other_query, tl.trans(right), scores)
        key_scale, key_offset = scale_of(word & 255), _offset((word << 16) >> 24, query.dtype, BITS)
        scores = (scores - key_offset[None, :] * query_sum[:, None]) * key_scale[None, :]
        scores, factor = exponents(scores, scale, score_cap, CAPPED)
        seen = place[None, :] < tl.minimum(full_from, end)[:, None]
        if WINDOW > 0:
            seen = seen & (place[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - highest[:, None])
        shrink = tl.exp2(peak - highest)
        peak = highest
        total = total * shrink + tl.sum(weights, 1)
        scaled = (weights * scale_of((word >> 16) & 255)[None, :]).to(query.dtype)
        value_offset = _offset(word >> 24, query.dtype, BITS)
        offset_sums = offset_sums * shrink + tl.sum(scaled.to(tl.float32) * value_offset[None, :], 1)
        if BITS == 8:
            mixed = dot(scaled, tl.trans(_numbers(value_codes, query.dtype)), mixed * shrink[:, None])
        else:
            left, right = _numbers_of_pairs(value_codes, query.dtype)
            mixed = dot(scaled, tl.trans(left), mixed * shrink[:, None])
            other_mixed = dot(scaled, tl.trans(right), other_mixed * shrink[:, None])
    mixed = mixed - offset_sums[:, None]
    if BITS == 4:
        mixed = tl.reshape(tl.join(mixed, other_mixed - offset_sums[:, None]), (ROWS, WIDTH))
    return peak, total, mixed


@triton.jit
def _load_tile(
    codes,
    words,
    table,
    start,
    end,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads a tile: its positions, codes of K [TILE, COLUMNS] and of V [COLUMNS, TILE], and its words (scales and
    offsets)."""
    CODE_BYTES: tl.constexpr = HEAD_SIZE * BITS // 8
    VALUES: tl.constexpr = BLOCK_SIZE * CODE_BYTES
    # TOGETHER tokens that begin at a multiple of TOGETHER are in one block. The compiler must know it, to load them
    # with one instruction.
    TOGETHER: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else (8 if BLOCK_SIZE % 8 == 0 else 1)
    start = start // TOGETHER * TOGETHER
    end = end // TOGETHER * TOGETHER
    feature = tl.arange(0, WIDTH * BITS // 8)
    place = start + tl.arange(0, TILE)
    block = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)
    key_place = codes + block[:, None] * BLOCK_STRIDE + (place % BLOCK_SIZE)[:, None] * CODE_BYTES
    key_there = (place < end)[:, None] & (feature < CODE_BYTES)[None, :]
    key_codes = tl.load(key_place + feature[None, :], mask=key_there, other=0)
    word_place = words + block * (BLOCK_STRIDE // 4) + VALUES // 2 + place % BLOCK_SIZE
    word = tl.load(word_place, mask=place < end, other=0)

    # The positions again, as columns: codes of V are stored feature by feature.
    across = start + tl.arange(0, TILE)[None, :]
    block_across = tl.load(table + across // BLOCK_SIZE, mask=across < end, other=0).to(tl.int64)
    block_across = tl.max_constancy(block_across, [1, TOGETHER])
    value_place = codes + VALUES + block_across * BLOCK_STRIDE + across % BLOCK_SIZE
    value_there = (across < end) & (feature < CODE_BYTES)[:, None]
    value_codes = tl.load(value_place + feature[:, None] * BLOCK_SIZE, mask=value_there, other=0)
    return place, key_codes, value_codes, word


@triton.jit
def widened(peak, total, mixed, ROWS: tl.constexpr):
    """Adds empty rows to the softmax of the store, up to ROWS rows."""
    if peak.shape[0] != ROWS:
        tl.static_assert(2 * peak.shape[0] == ROWS)
        peak = tl.reshape(tl.trans(tl.join(peak, tl.full(peak.shape, LOWEST, tl.float32))), (ROWS,))
        total = tl.reshape(tl.trans(tl.join(total, tl.zeros(total.shape, tl.float32))), (ROWS,))
        doubled = tl.permute(tl.join(mixed, tl.zeros(mixed.shape, tl.float32)), (2, 0, 1))
        mixed = tl.reshape(doubled, (ROWS, mixed.shape[1]))
    return peak, total, mixed


@triton.jit
def _offset(offset, TYPE: tl.constexpr, BITS: tl.constexpr):
    """Converts an offset byte to a float. `_numbers_of_pairs` returns codes that are too large by a constant; the
    offset includes that constant."""
    offset = offset.to(tl.float32)
    if BITS == 4:
        offset = offset * 0.0625 + 8.0
        if tl.bfloat16 == TYPE and not INTERPRETED:
            offset = offset + 128.0
    return offset


@triton.jit
def _numbers(codes, TYPE: tl.constexpr):
    """Converts signed bytes to TYPE for a product."""
    if tl.bfloat16 == TYPE and not INTERPRETED:
        # The code becomes the low byte of a bfloat16 with the high byte 0x43. The low seven bits of the code alone give
        # 128 + their value, its top bit alone gives 128 or 256. The first minus the second is the signed value. This
        # takes four instructions for two numbers.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 pair, other, low, high, minus;
            mov.b32 minus, 0xbf80bf80;
            prmt.b32 pair, $2, 0x43434343, 0x4140;
            prmt.b32 other, $2, 0x43434343, 0x4342;
            and.b32 low, pair, 0xff7fff7f;
            and.b32 high, pair, 0xff80ff80;
            fma.rn.bf16x2 $0, high, minus, low;
            and.b32 low, other, 0xff7fff7f;
            and.b32 high, other, 0xff80ff80;
            fma.rn.bf16x2 $1, high, minus, low;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return codes.to(tl.float32).to(TYPE)


@triton.jit
def _numbers_of_pairs(codes, TYPE: tl.constexpr):
    """Converts the low and the high four bits of bytes to TYPE; in bfloat16 the results are 128 too large."""
    if tl.bfloat16 == TYPE and not INTERPRETED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 lower, upper;
            and.b32 lower, $4, 0x0f0f0f0f;
            shr.b32 upper, $4, 4;
            and.b32 upper, upper, 0x0f0f0f0f;
            prmt.b32 $0, lower, 0x43434343, 0x4140;
            prmt.b32 $1, lower, 0x43434343, 0x4342;
            prmt.b32 $2, upper, 0x43434343, 0x4140;
            prmt.b32 $3, upper, 0x43434343, 0x4342;
            }
            """,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return (codes & 15).to(tl.float32).to(TYPE), ((codes >> 4) & 15).to(tl.float32).to(TYPE)
