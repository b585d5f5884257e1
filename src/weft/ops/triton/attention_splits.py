"""How a program of decode attention ends: it stores the partial result of its split. The program that finishes the last
split of a request joins all splits."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.attention_tiles import LOWEST, empty_softmax, joined, mean


@triton.jit
def finish_split(
    peak,
    total,
    mixed,
    output,  # address of the group's heads
    split_mixed,
    split_peaks,
    split_totals,
    arrivals,  # counter of the request and KV head
    first_entry,
    split,
    splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    JOINED_AT_ONCE: tl.constexpr,
):
    """Writes the final result if there is one split. Otherwise writes the partial result; the last program to arrive
    joins all."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (column < HEAD_SIZE)[None, :]
    if splits == 1:
        result = mean(total, mixed).to(output.dtype.element_ty)
        tl.store(output + row[:, None] * HEAD_SIZE + column[None, :], result, mask=there)
    else:
        entry = first_entry + split * GROUP + row
        tl.store(split_mixed + entry[:, None] * HEAD_SIZE + column[None, :], mixed, mask=there)
        tl.store(split_peaks + entry, peak, mask=row < GROUP)
        tl.store(split_totals + entry, total, mask=row < GROUP)
        # All threads of this program must have stored their part before one of them signals the other programs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(arrivals, 0)
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
    """Joins all splits of a request and KV head into one softmax, JOINED_AT_ONCE splits at a time."""
    row = tl.arange(0, JOINED_ROWS)
    column = tl.arange(0, WIDTH)
    peak, total, mixed = empty_softmax(JOINED_ROWS, WIDTH)
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
