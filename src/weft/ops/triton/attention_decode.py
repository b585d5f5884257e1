"""Attention of requests with one token each: the context is cut into splits, the last of them to end joins them.

A program is one split of one KV head of one request, with all the query heads that read that KV head. In a batch that
fills the card a request has one program for each KV head, and a few spare ones go to the requests with long contexts,
which would hold up the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_tiles import LOWEST, attend, joined, mean, nothing_seen
from weft.ops.triton.device import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["layer", "table_stride", "requests", "most_splits", "smallest_split"])
def decode_attention(
    queries,  # [tokens, QUERY_STRIDE]
    output,  # [tokens, heads * head size]
    cache,
    tables,
    rows,
    context_lengths,
    split_mixed,  # float32 [requests, kv heads, splits, group, head size]
    split_peaks,  # float32 [requests, kv heads, splits, group]
    split_totals,
    arrivals,  # int32 [requests, kv heads]: 0 before and after
    layer,
    table_stride,
    requests,
    most_splits,  # of a request
    smallest_split,
    scale,
    score_cap,
    SPARE: tl.constexpr,  # 0: `most_splits` programs for every request; else one, and so many for all together
    MOST_REQUESTS: tl.constexpr,  # a power of two that holds them
    FIXED_SPLIT: tl.constexpr,  # 0: a context is cut into as many equal splits as there are programs for
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # the group's heads, padded for the tensor cores
    JOINED_ROWS: tl.constexpr,  # the power of two that holds the group
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
    programs = most_splits
    if SPARE > 0:
        # The spare ones come first: what they work on takes longest.
        request, split, programs = _work_of(
            tl.program_id(1),
            context_lengths,
            requests,
            most_splits,
            smallest_split,
            SPARE,
            MOST_REQUESTS,
            WINDOW,
        )
    GROUP: tl.constexpr = HEADS // KV_HEADS
    VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE

    # The step's indices were there before the previous kernel began, so they are not waited for.
    context = tl.load(context_lengths + request)
    table = tables + tl.load(rows + request).to(tl.int64) * table_stride
    first_seen = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first_seen // TILE * TILE
    if FIXED_SPLIT > 0:
        split_size = FIXED_SPLIT
        first_split = first_seen // FIXED_SPLIT * FIXED_SPLIT
    else:
        first_split = first_tile
        even = tl.cdiv(tl.cdiv(context - first_split, programs), TILE) * TILE
        split_size = tl.maximum(smallest_split, even)
    splits = tl.maximum(tl.cdiv(context - first_split, split_size), 1)
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    if split >= splits:
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    features = (kv_head * GROUP + row)[:, None] * HEAD_SIZE + column[None, :]
    query = tl.load(queries + request.to(tl.int64) * QUERY_STRIDE + features, mask=there, other=0.0)
    peak, total, mixed = nothing_seen(ROWS, WIDTH)
    begin = tl.maximum(first_split + split * split_size, first_tile)
    peak, total, mixed = attend(
        query,
        tl.full((ROWS,), 0, tl.int32) + (context - 1),
        peak,
        total,
        mixed,
        begin,
        tl.minimum(first_split + (split + 1) * split_size, context),
        cache + (layer * 2 * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE),
        table,
        scale,
        score_cap,
        MASKED=True,
        WINDOW=WINDOW,
        CAPPED=CAPPED,
        HEAD_SIZE=HEAD_SIZE,
        WIDTH=WIDTH,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_STRIDE=LAYERS * 2 * VALUE_OFFSET,
        VALUE_OFFSET=VALUE_OFFSET,
        TILE=TILE,
        STAGES=STAGES,
    )
    _finish_split(
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
        most_splits,
        GROUP,
        HEAD_SIZE,
        WIDTH,
        ROWS,
        JOINED_ROWS,
        JOINED_AT_ONCE,
    )


@triton.jit
def _work_of(
    program,
    context_lengths,
    requests,
    most_splits,
    smallest_split,
    SPARE: tl.constexpr,
    MOST_REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The request of a program, its split (behind the last one where there is nothing to do), and how many programs
    the request has. Spare ones are given to the long contexts in their order, as far as they last."""
    request = tl.maximum(program - SPARE, 0)
    split = 0
    programs = 1
    seen = tl.load(context_lengths + request)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    if (program < SPARE) | (seen > 2 * smallest_split):
        each = tl.arange(0, MOST_REQUESTS)
        all_seen = tl.load(context_lengths + each, mask=each < requests, other=0)
        if WINDOW > 0:
            all_seen = tl.minimum(all_seen, WINDOW)
        wanted = tl.minimum(tl.maximum(all_seen - 1, 0) // (2 * smallest_split), most_splits - 1)
        end = tl.cumsum(wanted, 0)
        if program < SPARE:
            request = tl.sum((end <= program).to(tl.int32), 0)
        given = tl.minimum(tl.maximum(SPARE - (end - wanted), 0), wanted)
        programs += tl.sum(tl.where(each == request, given, 0), 0)
        if program < SPARE:
            split = 1 + program - tl.sum(tl.where(each == request, end - wanted, 0), 0)
            if request >= requests:
                request = 0
                split = most_splits
    return request, split, programs


@triton.jit
def _finish_split(
    peak,
    total,
    mixed,
    output,  # where the group's heads go
    split_mixed,
    split_peaks,
    split_totals,
    arrivals,
    pair,  # the request and its KV head, as one number
    split,
    splits,
    most_splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
):
    """Write the result of an only split; of several each writes its part, and the last to do so the result."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    if splits == 1:
        result = mean(total, mixed).to(output.dtype.element_ty)
        tl.store(output + row[:, None] * HEAD_SIZE + column[None, :], result, mask=there)
    else:
        first_entry = pair.to(tl.int64) * most_splits * GROUP
        entry = first_entry + split * GROUP + row
        tl.store(split_mixed + entry[:, None] * HEAD_SIZE + column[None, :], mixed, mask=there)
        tl.store(split_peaks + entry, peak, mask=row < GROUP)
        tl.store(split_totals + entry, total, mask=row < GROUP)
        # Every thread has stored before one of them says so to the other programs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(arrivals + pair, 0)
            all_total, all_mixed = _joined_splits(
                split_mixed,
                split_peaks,
                split_totals,
                first_entry,
                splits,
                GROUP,
                HEAD_SIZE,
                WIDTH,
                JOINED_ROWS,
                JOINED_AT_ONCE,
            )
            joined_row = tl.arange(0, JOINED_ROWS)
            joined_there = (joined_row < GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
            joined_result = mean(all_total, all_mixed).to(output.dtype.element_ty)
            places = output + joined_row[:, None] * HEAD_SIZE + column[None, :]
            tl.store(places, joined_result, mask=joined_there)


@triton.jit
def _joined_splits(
    split_mixed,
    split_peaks,
    split_totals,
    first_entry,
    splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
):
    """The softmax over all splits of a request and KV head, some of them at a time."""
    row = tl.arange(0, JOINED_ROWS)
    column = tl.arange(0, WIDTH)
    peak, total, mixed = nothing_seen(JOINED_ROWS, WIDTH)
    for start in range(0, splits, JOINED_AT_ONCE):
        split = start + tl.arange(0, JOINED_AT_ONCE)
        entry = first_entry + split[:, None] * GROUP + row[None, :]
        there = (split < splits)[:, None] & (row < GROUP)[None, :]
        peaks = tl.load(split_peaks + entry, mask=there, other=LOWEST)
        totals = tl.load(split_totals + entry, mask=there, other=0.0)
        values = tl.load(
            split_mixed + entry[:, :, None] * HEAD_SIZE + column[None, None, :],
            mask=there[:, :, None] & (column < HEAD_SIZE)[None, None, :],
            other=0.0,
        )
        highest = tl.max(peaks, 0)
        shrink = tl.exp2(peaks - highest[None, :])
        some_total = tl.sum(totals * shrink, 0)
        some_mixed = tl.sum(values * shrink[:, :, None], 0)
        peak, total, mixed = joined(peak, total, mixed, highest, some_total, some_mixed)
    return total, mixed
