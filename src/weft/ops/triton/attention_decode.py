"""Attention of requests with one token each. Contexts are split. The program that finishes the last split of a request
joins all its splits.

A program (thread block) works on splits of one KV head, with all query heads that read it. For few requests each
program has one split: each context is cut into equal splits, as many as there are programs for.

In a batch that fills the GPU there are as many programs as run at the same time. All tiles of the batch are divided
equally among them, across request borders. So all programs take about equally long:
  requests  |--A--|------B------|-C-|--D--|
  programs  |---0---|---1---|---2---|---3-|
The tiles of a program are called its share. If the contexts are about equal, each request has its own program instead.
Then nothing is joined, and the GPU's scheduler keeps all multiprocessors busy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_splits import finish_split
from weft.ops.triton.attention_store import attend_to_store, load_queries, widened
from weft.ops.triton.attention_tiles import attend, empty_softmax, full_begin_of
from weft.ops.triton.device import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["layer", "table_stride", "requests", "programs", "smallest_split", "leeway"])
def decode_attention(
    queries,  # [tokens, QUERY_STRIDE]
    output,  # [tokens, heads * head size]
    cache,
    codes,  # of the store, if BITS > 0
    words,
    tables,
    rows,
    context_lengths,
    split_mixed,  # float32 [splits of all requests and KV heads, group, head size]
    split_peaks,  # float32 [splits of all requests and KV heads, group]
    split_totals,
    arrivals,  # int32 [requests, kv heads]: 0 before and after the kernel
    layer,
    table_stride,
    requests,
    programs,  # programs of a KV head that run at the same time
    smallest_split,
    leeway,
    scale,
    score_cap,
    SHARED: tl.constexpr,  # the programs of a KV head share all its tiles; otherwise each has one split of a request
    MOST_REQUESTS: tl.constexpr,  # power of two >= requests
    FIXED_SPLIT: tl.constexpr,  # tokens of a split; 0: each context is cut into equal splits
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,  # heads of the group, padded for the tensor cores
    JOINED_ROWS: tl.constexpr,  # power of two >= heads of the group
    JOINED_AT_ONCE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,  # 0: there is no store
    TAIL_BLOCKS: tl.constexpr,
    STORE_ROWS: tl.constexpr,
    STORE_TILE: tl.constexpr,
    STORE_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of `requests` requests with one token each: queries [tokens, QUERY_STRIDE] over the paged cache, to
    output [tokens, heads * head size]. The module's docstring describes splits and programs. Partial results go to
    the workspace split_mixed, split_peaks and split_totals; `arrivals` counts the finished splits of each request."""
    kv_head = tl.program_id(0)
    # The step's indices were written before the previous kernel began, so the kernel need not wait for them.
    if SHARED:
        # Programs with the lowest id start first. Shares are numbered from the last program, so that programs without a
        # share start first and end at once.
        share = tl.num_programs(1) - 1 - tl.program_id(1)
        each = tl.arange(0, MOST_REQUESTS)
        contexts = tl.load(context_lengths + each, mask=each < requests, other=0)
        counts = tl.where(each < requests, _work_of(contexts, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS), 0)
        all_tiles = tl.sum(counts, 0)
        longest = tl.max(counts, 0)
        # Decides whether each request gets its own program, or all tiles are divided evenly. `programs` run at the same
        # time. With a program for each request, at most `most_read` / `programs` tiles are read one after another; divided
        # evenly, `all_tiles` / `programs`. Requests get their own programs if the difference is at most `leeway` tiles.
        most_read = tl.minimum(
            tl.cdiv(requests, programs) * longest * programs, all_tiles + longest * programs
        )
        has_own_programs = most_read <= all_tiles + leeway * programs
        if share < tl.where(has_own_programs, requests, programs):
            shares = tl.minimum(programs, all_tiles)
            if has_own_programs:
                begin, end = share * 0, all_tiles
                first_request, end_request, request_begin = share, share + 1, share * 0
            else:
                ends = tl.cumsum(counts, 0)
                begins = ends - counts
                begin = _cut(share, shares, all_tiles, begins, ends, smallest_split // TILE)
                end = _cut(share + 1, shares, all_tiles, begins, ends, smallest_split // TILE)
                first_request = tl.sum((ends <= begin).to(tl.int32), 0)
                end_request = tl.sum((ends < end).to(tl.int32), 0) + 1
                request_begin = tl.max(tl.where(begins <= begin, begins, 0), 0)
            next_request = tl.minimum(first_request, requests - 1)
            next_context, next_row = tl.load(context_lengths + next_request), tl.load(rows + next_request)
            wait_for_previous(DEPENDENT)
            let_next_begin(DEPENDENT)
            for index in range(0, end_request - first_request):
                request, context, row = first_request + index, next_context, next_row
                # Loads the indices of the next request now, so that the next iteration does not wait for them.
                next_request = tl.minimum(request + 1, requests - 1)
                next_context, next_row = tl.load(context_lengths + next_request), tl.load(rows + next_request)
                work = _work_of(context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
                request_end = request_begin + work
                begin_work = tl.maximum(begin - request_begin, 0)
                begin_tile = _tile_at(begin_work, context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
                end_work = tl.minimum(end - request_begin, work)
                end_tile = _tile_at(end_work, context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
                first_share = _share_of(request_begin, all_tiles, shares)
                splits = _share_of(request_end - 1, all_tiles, shares) - first_share + 1
                is_whole = has_own_programs | (request_end - request_begin <= smallest_split // TILE)
                _attend_to_split(
                    request,
                    row,
                    kv_head,
                    context,
                    begin_tile * TILE,
                    tl.minimum(end_tile * TILE, context),
                    tl.where(is_whole, 0, share - first_share),
                    tl.where(is_whole, 1, splits),
                    # The workspace entry of a split is request + share. From one split to the next, one of the two
                    # grows and neither shrinks, so no two splits use the same entry.
                    kv_head * (requests + programs) + request + first_share,
                    queries,
                    output,
                    cache,
                    codes,
                    words,
                    tables,
                    split_mixed,
                    split_peaks,
                    split_totals,
                    arrivals,
                    layer,
                    table_stride,
                    scale,
                    score_cap,
                    HEADS,
                    KV_HEADS,
                    HEAD_SIZE,
                    WIDTH,
                    ROWS,
                    JOINED_ROWS,
                    JOINED_AT_ONCE,
                    QUERY_STRIDE,
                    LAYERS,
                    BLOCK_SIZE,
                    WINDOW,
                    CAPPED,
                    TILE,
                    STAGES,
                    BITS,
                    TAIL_BLOCKS,
                    STORE_ROWS,
                    STORE_TILE,
                    STORE_STAGES,
                    FIXED_SPLIT > 0,
                )
                request_begin = request_end
    else:
        split = tl.program_id(1)
        request = tl.program_id(2)
        most_splits = tl.num_programs(1)
        context = tl.load(context_lengths + request)
        row = tl.load(rows + request)
        first_seen = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
        first_position = first_seen // TILE * TILE
        if BITS > 0 and FIXED_SPLIT == 0:
            work = _work_of(context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
            # The first units of work are the tiles with only stored positions, one unit each. A split has a multiple of
            # STEP units, so it reads whole tiles of the store.
            STEP: tl.constexpr = STORE_TILE // TILE if STORE_TILE > TILE else 1
            split_work = tl.maximum(smallest_split // TILE, tl.cdiv(work, most_splits))
            split_work = tl.cdiv(split_work, STEP) * STEP
            splits = tl.cdiv(work, split_work)
            begin_work = split * split_work
            begin_tile = _tile_at(begin_work, context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
            end_work = tl.minimum(begin_work + split_work, work)
            end_tile = _tile_at(end_work, context, WINDOW, TILE, BITS, BLOCK_SIZE, TAIL_BLOCKS)
            begin, end = begin_tile * TILE, tl.minimum(end_tile * TILE, context)
        else:
            if FIXED_SPLIT > 0:
                split_size = FIXED_SPLIT
                first_split = first_seen // FIXED_SPLIT * FIXED_SPLIT
            else:
                first_split = first_position
                even = tl.cdiv(tl.cdiv(context - first_split, most_splits), TILE) * TILE
                split_size = tl.maximum(smallest_split, even)
            splits = tl.maximum(tl.cdiv(context - first_split, split_size), 1)
            begin = tl.maximum(first_split + split * split_size, first_position)
            end = tl.minimum(first_split + (split + 1) * split_size, context)
        wait_for_previous(DEPENDENT)
        let_next_begin(DEPENDENT)
        if split < splits:
            _attend_to_split(
                request,
                row,
                kv_head,
                context,
                begin,
                end,
                split,
                splits,
                (request * KV_HEADS + kv_head) * most_splits,
                queries,
                output,
                cache,
                codes,
                words,
                tables,
                split_mixed,
                split_peaks,
                split_totals,
                arrivals,
                layer,
                table_stride,
                scale,
                score_cap,
                HEADS,
                KV_HEADS,
                HEAD_SIZE,
                WIDTH,
                ROWS,
                JOINED_ROWS,
                JOINED_AT_ONCE,
                QUERY_STRIDE,
                LAYERS,
                BLOCK_SIZE,
                WINDOW,
                CAPPED,
                TILE,
                STAGES,
                BITS,
                TAIL_BLOCKS,
                STORE_ROWS,
                STORE_TILE,
                STORE_STAGES,
                FIXED_SPLIT > 0,
            )


@triton.jit
def _work_of(
    context,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
):
    """The work of a request, in units. Without a store: one per visible tile. With a store, work is proportional to the
    bytes read: one per stored tile, 16 / BITS per full-precision tile. A padded request counts as one tile."""
    tiles = tl.cdiv(context, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(context - WINDOW, 0) // TILE
    tiles = tl.maximum(tiles, 1)
    if BITS > 0:
        stored = _stored_tiles(context, WINDOW, TILE, BLOCK_SIZE, TAIL_BLOCKS)
        return stored + (tiles - stored) * (16 // BITS)
    return tiles


@triton.jit
def _tile_at(
    work,
    context,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
):
    """The tile that contains unit `work` of a request, as an index in the whole context. Units and tiles count from 0. For
    the unit after the last one: the index after the last tile."""
    if BITS > 0:
        stored = _stored_tiles(context, WINDOW, TILE, BLOCK_SIZE, TAIL_BLOCKS)
        work = tl.where(work < stored, work, stored + (work - stored) // (16 // BITS))
    return (tl.maximum(context - WINDOW, 0) // TILE if WINDOW > 0 else 0) + work


@triton.jit
def _stored_tiles(
    context,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
):
    """The number of visible tiles with only stored blocks."""
    stored = full_begin_of(context - 1, BLOCK_SIZE, TAIL_BLOCKS) // TILE
    if WINDOW > 0:
        stored = tl.maximum(stored - tl.maximum(context - WINDOW, 0) // TILE, 0)
    return stored


@triton.jit
def _cut(share, shares, all_tiles, begins, ends, longest_whole):
    """The tile at which a share begins. A request of up to `longest_whole` tiles is not cut: the whole request goes to
    the share that would get most of it."""
    tile = tl.minimum(share * all_tiles // shares, all_tiles)
    begin = tl.max(tl.where(begins <= tile, begins, 0), 0)
    end = tl.min(tl.where(ends > tile, ends, tl.max(ends, 0)), 0)
    nearest = tl.where(tile - begin < end - tile, begin, end)
    return tl.where(end - begin <= longest_whole, nearest, tile)


@triton.jit
def _share_of(tile, all_tiles, shares):
    """The share s with s * all_tiles // shares <= tile < (s + 1) * all_tiles // shares."""
    return ((tile + 1) * shares - 1) // all_tiles


@triton.jit
def _attend_to_split(
    request,
    table_row,
    kv_head,
    context,
    begin,
    end,
    split,
    splits,
    first_entry,  # first entry of the request's splits in the workspace
    queries,
    output,
    cache,
    codes,
    words,
    tables,
    split_mixed,
    split_peaks,
    split_totals,
    arrivals,
    layer,
    table_stride,
    scale,
    score_cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
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
    BITS: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
    STORE_ROWS: tl.constexpr,
    STORE_TILE: tl.constexpr,
    STORE_STAGES: tl.constexpr,
    FIXED_TILES: tl.constexpr,
):
    """Attention of one request and KV head over the positions begin to end, first in the store, then in the cache.
    Writes the result, or the partial result of split `split` of `splits`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    features = (kv_head * GROUP + row)[:, None] * HEAD_SIZE + column[None, :]
    query = tl.load(queries + request.to(tl.int64) * QUERY_STRIDE + features, mask=there, other=0.0)
    positions = tl.full((ROWS,), 0, tl.int32) + (context - 1)
    table = tables + table_row.to(tl.int64) * table_stride
    full_from, full_begin = positions, 0
    if BITS > 0:
        full_begin = full_begin_of(context - 1, BLOCK_SIZE, TAIL_BLOCKS)
        full_from = tl.full((ROWS,), 0, tl.int32) + full_begin
        head = tl.arange(0, STORE_ROWS)
        heads = queries + request.to(tl.int64) * QUERY_STRIDE + (kv_head * GROUP + head) * HEAD_SIZE
        left, right, query_sum = load_queries(heads, head < GROUP, HEAD_SIZE, WIDTH, BITS)
        PART: tl.constexpr = BLOCK_SIZE * HEAD_SIZE * BITS // 4 + 4 * BLOCK_SIZE
        part = (layer * KV_HEADS + kv_head).to(tl.int64) * PART
        peak, total, mixed = attend_to_store(
            left,
            right,
            query_sum,
            tl.full((STORE_ROWS,), 0, tl.int32) + (context - 1),
            tl.full((STORE_ROWS,), 0, tl.int32) + full_begin,
            begin // STORE_TILE * STORE_TILE if FIXED_TILES else begin,
            tl.minimum(end, full_begin),
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
        peak, total, mixed = widened(peak, total, mixed, ROWS)
        begin = tl.maximum(begin, full_begin // TILE * TILE)
    else:
        peak, total, mixed = empty_softmax(ROWS, WIDTH)
    peak, total, mixed = attend(
        query,
        positions,
        peak,
        total,
        mixed,
        begin,
        end,
        full_from,
        full_begin,
        cache + (layer * 2 * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE),
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
        BLOCK_STRIDE=LAYERS * 2 * VALUE_OFFSET,
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
        arrivals + request * KV_HEADS + kv_head,
        first_entry.to(tl.int64) * GROUP,
        split,
        splits,
        GROUP,
        HEAD_SIZE,
        WIDTH,
        ROWS,
        JOINED_ROWS,
        JOINED_AT_ONCE,
    )
