"""The kernels that turn what the host wrote of a step into the index arrays that the model's kernels read, and that tell
the host what was sampled.

The host's words lie in pinned memory that the card reads itself, so a decode step costs no copy in either direction:

    inbox   [ entries | updates | rows .. | starts .. | update rows .. | indices .. | blocks .. ]   in every slot
    outbox  [ tokens .. | errors .. ]                                                               in every slot

`turn`, a counter on the device, says which slot is meant: a graph that was captured once serves them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = 2
"""Words of an inbox in front of its columns."""

INBOX_COLUMNS = 5


# Numbers of entries are not compiled into a kernel, nor is where a parcel begins: one compilation serves every step.
@triton.jit(do_not_specialize=["size"])
def prepare_decodes(
    turn,
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
    """A step in which every entry is one token that samples, padded to `size` entries. One program does it all: what it
    writes into the block tables it reads again."""
    letter = inbox + (tl.load(turn) % SLOTS) * (2 + 5 * CAPACITY)
    # The whole letter at once, what is old in it too: to learn first how much is new would be a second way to the host.
    entries = tl.load(letter)
    updates = tl.load(letter + 1)
    columns = letter + 2
    entry = tl.arange(0, WIDTH)
    is_there = entry < CAPACITY
    row = tl.load(columns + entry, mask=is_there, other=0)
    position = tl.load(columns + CAPACITY + entry, mask=is_there, other=0)
    update_row = tl.load(columns + 2 * CAPACITY + entry, mask=is_there, other=0).to(tl.int64)
    update_index = tl.load(columns + 3 * CAPACITY + entry, mask=is_there, other=0)
    update_block = tl.load(columns + 4 * CAPACITY + entry, mask=is_there, other=0)
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
    parcel,
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
    """Any step, without padding: a program for every entry and every WIDTH of its tokens. The parcel has for each entry
    row, start, where its tokens begin in the step, how many there are, and its number among those that sample, or -1."""
    entry = tl.program_id(0)
    row = tl.load(parcel + entry)
    start = tl.load(parcel + entries + entry)
    first = tl.load(parcel + 2 * entries + entry)
    count = tl.load(parcel + 3 * entries + entry)
    sample = tl.load(parcel + 4 * entries + entry)
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
    parcel,
    segments,
    updates,
    tokens,
    tables,
    ROW_TOKENS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes rows that begin, and new entries of block tables. The parcel has for each segment what it is part of (0:
    tokens, 1: a block table), its row, where in the row it begins, its length, and where in the parcel it lies; then row,
    index and block of each update. Nothing is written twice, so programs need no order."""
    piece = tl.program_id(0)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if piece < segments:
        part = tl.load(parcel + piece)
        row = tl.load(parcel + segments + piece).to(tl.int64)
        first = tl.load(parcel + 2 * segments + piece)
        length = tl.load(parcel + 3 * segments + piece)
        source = tl.load(parcel + 4 * segments + piece)
        values = tl.load(parcel + source + place, mask=place < length, other=0)
        if part == 0:
            tl.store(tokens + row * ROW_TOKENS + first + place, values, mask=place < length)
        else:
            tl.store(tables + row * ROW_BLOCKS + first + place, values, mask=place < length)
    elif tl.program_id(1) == 0:
        update = (piece - segments) * WIDTH + tl.arange(0, WIDTH)
        is_update = update < updates
        columns = parcel + 5 * segments
        row = tl.load(columns + update, mask=is_update, other=0).to(tl.int64)
        index = tl.load(columns + updates + update, mask=is_update, other=0)
        block = tl.load(columns + 2 * updates + update, mask=is_update, other=0)
        tl.store(tables + row * ROW_BLOCKS + index, block, mask=is_update)


@triton.jit(do_not_specialize=["sampled"])
def publish(
    turn,
    outbox,
    tokens,
    errors,
    sampled,
    SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The last kernel of a step: what was sampled goes to the host, and it is the next slot's turn."""
    now = tl.load(turn)
    letter = outbox + (now % SLOTS) * (2 * CAPACITY)
    entry = tl.arange(0, WIDTH)
    is_entry = entry < sampled
    token = tl.load(tokens + entry, mask=is_entry, other=0)
    error = tl.load(errors + entry, mask=is_entry, other=0)
    tl.store(letter + entry, token, mask=is_entry)
    tl.store(letter + CAPACITY + entry, error, mask=is_entry)
    # Everybody has read the counter by now: no thread of the program may see the next turn.
    tl.debug_barrier()
    tl.store(turn, now + 1)
