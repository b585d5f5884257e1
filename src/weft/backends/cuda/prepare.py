"""Kernels that make the index arrays of a step from what the host wrote, and that write sampled tokens for the host.

Kernels access pinned host memory directly, so a decode step needs no copy in either direction. Every mailbox slot has:

    inbox   [ entries | updates | rows .. | starts .. | update rows .. | indices .. | blocks .. ]
    outbox  [ tokens .. | errors .. ]

`step_count`, a counter on the GPU, selects the slot, so that one captured graph works with all slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = 2
"""Words of an inbox before its columns."""

INBOX_COLUMNS = 5


# Triton must not specialise kernels for numbers of entries, so that one compilation serves every step.
@triton.jit(do_not_specialize=["size"])
def prepare_decodes(
    step_count,
    inbox,
    size,
    tokens,
    tables,
    token_ids,
    positions,
    cells,
    rows,
    query_starts,
    context_lengths,
    logit_indices,
    sampled_rows,
    sampled_positions,
    SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Makes the index arrays of a step of decodes, padded to `size` entries. There is only one program, because it reads
    block-table entries that it has just written."""
    slot = inbox + (tl.load(step_count) % SLOTS) * (2 + 5 * CAPACITY)
    # Loads whole columns, including their unused part: loading the counts first would be a second round trip to host
    # memory.
    entries = tl.load(slot)
    updates = tl.load(slot + 1)
    columns = slot + 2
    entry = tl.arange(0, WIDTH)
    in_column = entry < CAPACITY
    row = tl.load(columns + entry, mask=in_column, other=0)
    position = tl.load(columns + CAPACITY + entry, mask=in_column, other=0)
    update_row = tl.load(columns + 2 * CAPACITY + entry, mask=in_column, other=0).to(tl.int64)
    update_index = tl.load(columns + 3 * CAPACITY + entry, mask=in_column, other=0)
    update_block = tl.load(columns + 4 * CAPACITY + entry, mask=in_column, other=0)
    tl.store(tables + update_row * ROW_BLOCKS + update_index, update_block, mask=entry < updates)
    tl.debug_barrier()

    is_entry = entry < entries
    in_batch = entry < size
    row = tl.where(is_entry, row, 0)
    position = tl.where(is_entry, position, 0)
    wide_row = row.to(tl.int64)
    token = tl.load(tokens + wide_row * ROW_TOKENS + position, mask=is_entry, other=0)
    block = tl.load(tables + wide_row * ROW_BLOCKS + position // BLOCK_SIZE, mask=is_entry, other=0)
    cell = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + entry, token, mask=in_batch)
    tl.store(positions + entry, position, mask=in_batch)
    tl.store(cells + entry, tl.where(is_entry, cell, -1), mask=in_batch)
    tl.store(rows + entry, row, mask=in_batch)
    tl.store(query_starts + entry, entry, mask=in_batch)
    tl.store(query_starts + size, size)
    tl.store(context_lengths + entry, tl.where(is_entry, position + 1, 0), mask=in_batch)
    tl.store(logit_indices + entry, entry, mask=in_batch)
    tl.store(sampled_rows + entry, tl.where(is_entry, row, -1), mask=in_batch)
    tl.store(sampled_positions + entry, position + 1, mask=in_batch)


@triton.jit(do_not_specialize=["entries"])
def prepare_tokens(
    staged,
    entries,
    tokens,
    tables,
    token_ids,
    positions,
    cells,
    rows,
    query_starts,
    context_lengths,
    logit_indices,
    sampled_rows,
    sampled_positions,
    ROW_TOKENS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Makes the index arrays of any step, without padding. There is one program for every WIDTH tokens of an entry.

    staged  [ rows .. | starts .. | first token in the step .. | counts .. | number of the sample, or -1 .. ]
    """
    entry = tl.program_id(0)
    row = tl.load(staged + entry)
    start = tl.load(staged + entries + entry)
    first = tl.load(staged + 2 * entries + entry)
    count = tl.load(staged + 3 * entries + entry)
    sample = tl.load(staged + 4 * entries + entry)
    wide_row = row.to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_token = token < count
    position = start + token
    token_id = tl.load(tokens + wide_row * ROW_TOKENS + position, mask=is_token, other=0)
    block = tl.load(tables + wide_row * ROW_BLOCKS + position // BLOCK_SIZE, mask=is_token, other=0)
    tl.store(token_ids + first + token, token_id, mask=is_token)
    tl.store(positions + first + token, position, mask=is_token)
    cell = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(cells + first + token, cell, mask=is_token)
    if tl.program_id(1) == 0:
        tl.store(rows + entry, row)
        tl.store(query_starts + entry, first)
        if entry == entries - 1:
            tl.store(query_starts + entries, first + count)
        tl.store(context_lengths + entry, start + count)
        if sample >= 0:
            tl.store(logit_indices + sample, first + count - 1)
            tl.store(sampled_rows + sample, row)
            tl.store(sampled_positions + sample, start + count)


@triton.jit(do_not_specialize=["segments", "updates"])
def apply_changes(
    staged,
    segments,
    updates,
    tokens,
    tables,
    ROW_TOKENS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the segments of new rows, and new block-table entries, in any order: no word is written twice.

    staged  [ part .. | row .. | first index .. | length .. | offset in staged .. ]     of each segment
            [ row .. | index .. | block .. ]                                            of each update
            [ contents of the segments .. ]
    part    0: tokens, 1: block table
    """
    segment = tl.program_id(0)
    offset = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if segment < segments:
        part = tl.load(staged + segment)
        row = tl.load(staged + segments + segment).to(tl.int64)
        first = tl.load(staged + 2 * segments + segment)
        length = tl.load(staged + 3 * segments + segment)
        source = tl.load(staged + 4 * segments + segment)
        values = tl.load(staged + source + offset, mask=offset < length, other=0)
        if part == 0:
            tl.store(tokens + row * ROW_TOKENS + first + offset, values, mask=offset < length)
        else:
            tl.store(tables + row * ROW_BLOCKS + first + offset, values, mask=offset < length)
    elif tl.program_id(1) == 0:
        update = (segment - segments) * WIDTH + tl.arange(0, WIDTH)
        is_update = update < updates
        columns = staged + 5 * segments
        row = tl.load(columns + update, mask=is_update, other=0).to(tl.int64)
        index = tl.load(columns + updates + update, mask=is_update, other=0)
        block = tl.load(columns + 2 * updates + update, mask=is_update, other=0)
        tl.store(tables + row * ROW_BLOCKS + index, block, mask=is_update)


@triton.jit(do_not_specialize=["sampled"])
def publish(
    step_count,
    outbox,
    tokens,
    errors,
    sampled,
    SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The last kernel of a step: writes sampled tokens and errors to the outbox, and selects the next slot."""
    count = tl.load(step_count)
    slot = outbox + (count % SLOTS) * (2 * CAPACITY)
    entry = tl.arange(0, WIDTH)
    is_entry = entry < sampled
    token = tl.load(tokens + entry, mask=is_entry, other=0)
    error = tl.load(errors + entry, mask=is_entry, other=0)
    tl.store(slot + entry, token, mask=is_entry)
    tl.store(slot + CAPACITY + entry, error, mask=is_entry)
    # All threads must have read the counter before it changes.
    tl.debug_barrier()
    tl.store(step_count, count + 1)
