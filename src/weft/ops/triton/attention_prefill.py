"""Attention of requests with several tokens each, over what was cached before and the tokens themselves.

A program is a piece of one request's tokens, for one KV head with all the query heads that read it: its rows are
(token, head), so that a tile of K and V serves all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_tiles import attend, attend_to_rows, joined, mean, nothing_seen
from weft.ops.triton.device import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["layer", "table_stride", "first_request"])
def prefill_attention(
    queries,  # [tokens, QUERY_STRIDE]
    qkv,  # with FROM_ROWS a tensor descriptor of the same rows with K and V
    output,  # [tokens, heads * head size]
    cache,
    tables,
    rows,
    query_starts,
    context_lengths,
    layer,
    table_stride,
    first_request,
    scale,
    score_cap,
    FIXED_SPLIT: tl.constexpr,  # 0: one softmax over the context; else one for each split, joined in their order
    FROM_ROWS: tl.constexpr,  # where a request's whole context is in the step, it is read from the rows
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
    DEPENDENT: tl.constexpr,
):
    if first_request == 0:
        wait_for_previous(DEPENDENT)
        let_next_begin(DEPENDENT)
    kv_head = tl.program_id(0)
    request = first_request + tl.program_id(1)
    # The last tokens see most: begun first, they do not end last.
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

    peak, total, mixed = nothing_seen(ROWS, WIDTH)
    if FIXED_SPLIT > 0:
        for split in range(first_seen // FIXED_SPLIT * FIXED_SPLIT, end, FIXED_SPLIT):
            some_peak, some_total, some_mixed = nothing_seen(ROWS, WIDTH)
            some_peak, some_total, some_mixed = attend(
                query,
                positions,
                some_peak,
                some_total,
                some_mixed,
                tl.maximum(split, begin),
                tl.minimum(split + FIXED_SPLIT, end),
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
            peak, total, mixed = joined(peak, total, mixed, some_peak, some_total, some_mixed)
    else:
        # Only the tiles at the window's edge and around the tokens themselves are hidden from some rows.
        all_see_until = (first_position + 1) // TILE * TILE
        all_see_from = begin
        if WINDOW > 0:
            all_see_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, all_see_until)
        if context == count if FROM_ROWS else False:
            for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
                peak, total, mixed = attend_to_rows(
                    query,
                    positions,
                    peak,
                    total,
                    mixed,
                    begin if part == 0 else (all_see_from if part == 1 else all_see_until),
                    all_see_from if part == 0 else (all_see_until if part == 1 else end),
                    qkv,
                    first_token,
                    (HEADS + kv_head) * HEAD_SIZE,
                    (HEADS + KV_HEADS + kv_head) * HEAD_SIZE,
                    scale,
                    score_cap,
                    MASKED=part != 1,
                    WINDOW=WINDOW,
                    CAPPED=CAPPED,
                    TILE=TILE,
                    STAGES=STAGES,
                )
        else:
            for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
                peak, total, mixed = attend(
                    query,
                    positions,
                    peak,
                    total,
                    mixed,
                    begin if part == 0 else (all_see_from if part == 1 else all_see_until),
                    all_see_from if part == 0 else (all_see_until if part == 1 else end),
                    keys,
                    table,
                    scale,
                    score_cap,
                    MASKED=part != 1,
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
        # The kernel in front attends for the requests before: nothing here is read from it or written by it, and what
        # both read was there when it let this one begin. So they run side by side, and the one behind waits for both.
        wait_for_previous(DEPENDENT)
        let_next_begin(DEPENDENT)
