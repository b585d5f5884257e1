"""Attention of requests with several tokens each, over the cached context and the tokens of the step.

A program (thread block) computes some tokens of one request, for one KV head with all query heads that read it. Its
rows are (token, head) pairs, so that all of them share a tile of K and V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_store import attend_to_store, attend_to_store_by_rows, load_queries
from weft.ops.triton.attention_tiles import (
    attend,
    attend_to_rows,
    empty_softmax,
    full_begin_of,
    joined,
    mean,
)
from weft.ops.triton.device import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["layer", "table_stride", "first_request"])
def prefill_attention(
    queries,  # [tokens, QUERY_STRIDE]
    qkv,  # with FROM_ROWS: a tensor descriptor of the same rows, including K and V
    output,  # [tokens, heads * head size]
    cache,
    codes,  # of the store, if BITS > 0
    words,
    tables,
    rows,
    query_starts,
    context_lengths,
    layer,
    table_stride,
    first_request,
    scale,
    score_cap,
    FIXED_SPLIT: tl.constexpr,  # 0: one softmax over the context; otherwise one for each split, joined in order
    FROM_ROWS: tl.constexpr,  # if the whole context of a request is in the step, K and V are read from the rows
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,  # 0: there is no store
    TAIL_BLOCKS: tl.constexpr,
    STORE_TILE: tl.constexpr,
    STORE_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of the requests from `first_request` on, with several tokens each: queries [tokens, QUERY_STRIDE] over
    the paged cache, to output [tokens, heads * head size]. Grid (KV heads, requests, groups of TOKENS tokens)."""
    if first_request == 0:
        wait_for_previous(DEPENDENT)
        let_next_begin(DEPENDENT)
    kv_head = tl.program_id(0)
    request = first_request + tl.program_id(1)
    # The last tokens have the longest context, so their programs start first: otherwise they would finish long after
    # the others.
    piece = tl.num_programs(2) - 1 - tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    BLOCK_STRIDE: tl.constexpr = LAYERS * 2 * VALUE_OFFSET

    first_token = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - first_token
    if piece * TOKENS >= count:
        return
    context = tl.load(context_lengths + request)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    token = piece * TOKENS + row // GROUP
    there = ((row < TOKENS * GROUP) & (token < count))[:, None] & (column < HEAD_SIZE)[None, :]
    features = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_SIZE + column[None, :]
    token_row = (first_token + token).to(tl.int64)[:, None]
    query = tl.load(queries + token_row * QUERY_STRIDE + features, mask=there, other=0.0)

    first_position = context - count + piece * TOKENS
    positions = first_position + row // GROUP
    end = tl.minimum(first_position + TOKENS, context)
    first_seen = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    begin = first_seen // TILE * TILE
    keys = cache + (layer * 2 * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE)
    table = tables + tl.load(rows + request).to(tl.int64) * table_stride

    full_from, full_begin, store_end = positions, 0, 0
    if BITS > 0:
        # The tail begins at a different block for the first and the last token. Between these borders, some rows read a
        # block from the store, others in full precision.
        full_from = full_begin_of(positions, BLOCK_SIZE, TAIL_BLOCKS)
        full_begin = full_begin_of(first_position, BLOCK_SIZE, TAIL_BLOCKS)
        store_end = full_begin_of(end - 1, BLOCK_SIZE, TAIL_BLOCKS)
        heads = queries + (first_token + token).to(tl.int64) * QUERY_STRIDE
        heads += (kv_head * GROUP + row % GROUP) * HEAD_SIZE
        is_token = (row < TOKENS * GROUP) & (token < count)
        left, right, query_sum = load_queries(heads, is_token, HEAD_SIZE, WIDTH, BITS)
        PART: tl.constexpr = BLOCK_SIZE * HEAD_SIZE * BITS // 4 + 4 * BLOCK_SIZE
        part = (layer * KV_HEADS + kv_head).to(tl.int64) * PART

    peak, total, mixed = empty_softmax(ROWS, WIDTH)
    if FIXED_SPLIT > 0:
        for split in range(first_seen // FIXED_SPLIT * FIXED_SPLIT, end, FIXED_SPLIT):
            some_begin, some_end = tl.maximum(split, begin), tl.minimum(split + FIXED_SPLIT, end)
            if BITS > 0:
                some_peak, some_total, some_mixed = attend_to_store(
                    left,
                    right,
                    query_sum,
                    positions,
                    full_from,
                    some_begin // STORE_TILE * STORE_TILE,
                    tl.minimum(some_end, store_end),
                    codes + part,
                    words + part // 4,
                    table + table_stride // 2,
                    scale,
                    score_cap,
                    WINDOW=WINDOW,
                    CAPPED=CAPPED,
                    BITS=BITS,
                    HEAD_SIZE=HEAD_SIZE,
                    WIDTH=WIDTH,
                    BLOCK_SIZE=BLOCK_SIZE,
                    BLOCK_STRIDE=LAYERS * KV_HEADS * PART,
                    TILE=STORE_TILE,
                    STAGES=STORE_STAGES,
                )
                some_begin = tl.maximum(some_begin, full_begin // TILE * TILE)
            else:
                some_peak, some_total, some_mixed = empty_softmax(ROWS, WIDTH)
            some_peak, some_total, some_mixed = attend(
                query,
                positions,
                some_peak,
                some_total,
                some_mixed,
                some_begin,
                some_end,
                full_from,
                full_begin,
                keys,
                table,
                scale,
                score_cap,
                MASKED=True,
                TIERED=BITS > 0,
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
            peak, total, mixed = joined(peak, total, mixed, some_peak, some_total, some_mixed)
    else:
        # The context has three sections: 0 is at the edge of the window or of the store, 1 in the middle, 2 around the
        # program's own tokens. Only 0 and 2 need masks.
        all_see_until = (first_position + 1) // TILE * TILE
        all_see_from = begin
        if WINDOW > 0:
            all_see_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, all_see_until)
        if BITS > 0:
            peak, total, mixed = attend_to_store_by_rows(
                left,
                right,
                query_sum,
                positions,
                full_from,
                begin,
                store_end,
                codes + part,
                words + part // 4,
                table + table_stride // 2,
                scale,
                score_cap,
                WINDOW=WINDOW,
                CAPPED=CAPPED,
                BITS=BITS,
                HEAD_SIZE=HEAD_SIZE,
                WIDTH=WIDTH,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_STRIDE=LAYERS * KV_HEADS * PART,
                TILE=STORE_TILE,
                STAGES=STORE_STAGES,
            )
            begin = tl.maximum(begin, full_begin // TILE * TILE)
            all_see_from = tl.maximum(all_see_from, tl.cdiv(store_end, TILE) * TILE)
            all_see_from = tl.maximum(tl.minimum(all_see_from, all_see_until), begin)
            all_see_until = tl.maximum(all_see_until, all_see_from)
        # K and V of a new prompt are read from the rows of the step, unless it is so long that its last tokens read its
        # first blocks from the store.
        if (context == count) & (store_end == 0) if FROM_ROWS else False:
            for section in tl.static_range(0 if WINDOW > 0 else 1, 3):
                peak, total, mixed = attend_to_rows(
                    query,
                    positions,
                    peak,
                    total,
                    mixed,
                    begin if section == 0 else (all_see_from if section == 1 else all_see_until),
                    all_see_from if section == 0 else (all_see_until if section == 1 else end),
                    qkv,
                    first_token,
                    (HEADS + kv_head) * HEAD_SIZE,
                    (HEADS + KV_HEADS + kv_head) * HEAD_SIZE,
                    scale,
                    score_cap,
                    MASKED=section != 1,
                    WINDOW=WINDOW,
                    CAPPED=CAPPED,
                    TILE=TILE,
                    STAGES=STAGES,
                )
        else:
            for section in tl.static_range(0 if WINDOW > 0 or BITS > 0 else 1, 3):
                peak, total, mixed = attend(
                    query,
                    positions,
                    peak,
                    total,
                    mixed,
                    begin if section == 0 else (all_see_from if section == 1 else all_see_until),
                    all_see_from if section == 0 else (all_see_until if section == 1 else end),
                    full_from,
                    full_begin,
                    keys,
                    table,
                    scale,
                    score_cap,
                    MASKED=section != 1,
                    TIERED=BITS > 0,
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
    result = mean(total, mixed).to(output.dtype.element_ty)
    tl.store(output + token_row * (HEADS * HEAD_SIZE) + features, result, mask=there)
    if first_request > 0:
        # The previous kernel is decode attention of the same step. Neither kernel reads or writes the other's
        # results, and their inputs were ready when the previous kernel allowed this one to begin. So both run in
        # parallel; the next kernel waits for both.
        wait_for_previous(DEPENDENT)
        let_next_begin(DEPENDENT)
