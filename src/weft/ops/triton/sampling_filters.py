"""The floors of top-k, top-p and typical-p: the lowest score (or the largest distance) that each of them keeps.

No sorting: scores are whole numbers of the same order (`ordered`), and each pass over an entry's scores finds the next
four bits of its floor, from how many tokens, or how much probability, lie in each sixteenth of what is left:

    pass 1   |----.----.----.----| all numbers; the floor is in the part where the tokens above it come to be enough
    pass 2        |-.-.-.-|        that part; and so on, eight times (four where logits are bfloat16 and untouched)

The vocabulary is cut into pieces of a fixed size, and sums are made in a fixed order: company changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling import (
    COLDEST_SINGLE,
    FLAGS,
    HAS_MIN_P,
    HAS_TOP_K,
    HAS_TOP_P,
    HAS_TYPICAL_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    is_last_to_arrive,
    is_touched,
    keeps,
    load_floor,
    load_scores,
    ordered,
    surprise_keys,
)

BY_COUNT: tl.constexpr = tl.constexpr(0)
BY_MASS: tl.constexpr = tl.constexpr(1)
BY_SURPRISE: tl.constexpr = tl.constexpr(2)
PARTS: tl.constexpr = tl.constexpr(16)


@triton.jit
def best_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    words_ptr,
    mask_lines_ptr,
    best_ptr,
    partials_ptr,
    counters_ptr,
    vocabulary,
    logits_stride,
    row_words,
    pieces,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The best score of each entry that has a filter; grid (entries, pieces)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    flags = tl.load(words_ptr + row.to(tl.int64) * row_words + FLAGS)
    if (flags & (HAS_TOP_P + HAS_MIN_P + HAS_TYPICAL_P)) == 0:
        return
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    scores_line = scores_ptr + entry.to(tl.int64) * vocabulary
    best = tl.full((TILE,), float("-inf"), tl.float32)
    for tile in range(TILES):
        token_ids = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED)
        best = tl.where(scores > best, scores, best)
    tl.store(partials_ptr + (entry * PIECES + piece) * PARTS, tl.max(best, 0).to(tl.float64))
    if is_last_to_arrive(counters_ptr + entry, pieces):
        piece_ids = tl.arange(0, PIECES)
        highest = tl.load(
            partials_ptr + (entry * PIECES + piece_ids) * PARTS,
            mask=piece_ids < pieces,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        tl.store(best_ptr + entry, tl.max(highest, 0).to(tl.float32))


@triton.jit
def mean_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    words_ptr,
    doubles_ptr,
    mask_lines_ptr,
    floors_ptr,
    best_ptr,
    mean_ptr,
    partials_ptr,
    counters_ptr,
    vocabulary,
    logits_stride,
    row_words,
    floors_stride,
    pieces,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The expected relative score, over temperature, of what the other filters keep: a token's surprise less the
    entropy is this less its own. Grid (entries, pieces)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    flags = tl.load(words_ptr + row.to(tl.int64) * row_words + FLAGS)
    if (flags & HAS_TYPICAL_P) == 0:
        return
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    temperature = tl.load(row_doubles + TEMPERATURE)
    best = tl.load(best_ptr + entry)
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    scores_line = scores_ptr + entry.to(tl.int64) * vocabulary
    masses = tl.zeros((TILE,), tl.float64)
    moments = tl.zeros((TILE,), tl.float64)
    for tile in range(TILES):
        token_ids = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED)
        kept = keeps(
            scores, flags, entry, row_doubles, floors_ptr, best_ptr, mean_ptr, floors_stride, TYPICAL=False
        )
        relative = (scores - best).to(tl.float64) / temperature
        mass = tl.where(kept, tl.exp(relative), 0.0)
        masses += mass
        moments += tl.where(mass > 0.0, mass * relative, 0.0)
    place = partials_ptr + (entry * PIECES + piece) * PARTS
    tl.store(place, tl.sum(masses, 0))
    tl.store(place + 1, tl.sum(moments, 0))
    if is_last_to_arrive(counters_ptr + entry, pieces):
        piece_ids = tl.arange(0, PIECES)
        inside = piece_ids < pieces
        places = partials_ptr + (entry * PIECES + piece_ids) * PARTS
        mass = tl.sum(tl.load(places, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        moment = tl.sum(tl.load(places + 1, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        tl.store(mean_ptr + entry, moment / mass)


@triton.jit(do_not_specialize=["shift"])
def narrow_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    words_ptr,
    doubles_ptr,
    mask_lines_ptr,
    floors_ptr,
    above_ptr,
    targets_ptr,
    best_ptr,
    mean_ptr,
    partials_ptr,
    counters_ptr,
    vocabulary,
    logits_stride,
    row_words,
    floors_stride,
    pieces,
    shift,
    MODE: tl.constexpr,
    HALVES: tl.constexpr,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The four bits from `shift` on of the floor by MODE, in a grid (entries, pieces); the last program of an entry
    decides. HALVES: logits are bfloat16, whose lower sixteen bits say nothing."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    flags = tl.load(row_ints + FLAGS)
    wanted = HAS_TYPICAL_P
    if MODE == BY_COUNT:
        wanted = HAS_TOP_K
    elif MODE == BY_MASS:
        wanted = HAS_TOP_P
    if (flags & wanted) == 0:
        return
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    if HALVES and MODE != BY_SURPRISE:
        if (shift < 16) & (touched == 0):
            return
    is_first = shift == 28
    low = load_floor(floors_ptr + MODE * floors_stride + entry, is_first == 0)
    by_count = tl.zeros((), tl.uint32)
    if MODE == BY_MASS:
        by_count = load_floor(floors_ptr + entry, (flags & HAS_TOP_K) != 0)
    temperature = tl.load(row_doubles + TEMPERATURE)
    heat = (1.0 / tl.maximum(temperature, COLDEST_SINGLE)).to(tl.float32)
    best = tl.load(best_ptr + entry)
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    scores_line = scores_ptr + entry.to(tl.int64) * vocabulary
    parts = tl.arange(0, PARTS)
    if MODE == BY_COUNT:
        counts = tl.zeros(
            (TILE,), tl.uint64
        )  # in each lane sixteen counts of four bits: TILES is less than sixteen
    else:
        sums = tl.zeros((PARTS, TILE), tl.float32)
    for tile in range(TILES):
        token_ids = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED)
        keys = ordered(scores)
        if MODE == BY_SURPRISE:
            kept = keeps(
                scores,
                flags,
                entry,
                row_doubles,
                floors_ptr,
                best_ptr,
                mean_ptr,
                floors_stride,
                TYPICAL=False,
            )
            keys = surprise_keys(scores, best, temperature, tl.load(mean_ptr + entry))
        else:
            kept = (keys >= by_count) & (token_ids < vocabulary)
        part = (keys - low) >> shift.to(tl.uint32)  # what is below wraps around and is in no part
        if MODE == BY_COUNT:
            is_counted = kept & (part < PARTS)
            counts += is_counted.to(tl.uint64) << ((part & (PARTS - 1)) * 4).to(tl.uint64)
        else:
            weights = tl.where(kept, tl.exp((scores - best) * heat), 0.0)
            sums += tl.where(part[None, :] == parts[:, None], weights[None, :], 0.0)
    place = partials_ptr + (entry * PIECES + piece) * PARTS
    if MODE == BY_COUNT:
        unpacked = (counts[None, :] >> (parts[:, None] * 4).to(tl.uint64)) & 15
        tl.store(place + parts, tl.sum(unpacked.to(tl.int32), 1).to(tl.float64))
    else:
        tl.store(place + parts, tl.sum(sums, 1).to(tl.float64))

    if is_last_to_arrive(counters_ptr + entry, pieces):
        piece_ids = tl.arange(0, PIECES)
        places = partials_ptr + (entry * PIECES + piece_ids[:, None]) * PARTS + parts[None, :]
        inside = (piece_ids < pieces)[:, None] & (parts >= 0)[None, :]
        totals = tl.sum(tl.load(places, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        above = tl.load(above_ptr + entry, mask=is_first == 0, other=0.0)
        if MODE == BY_COUNT:
            target = tl.load(row_ints + TOP_K).to(tl.float64)
        else:
            share = tl.load(row_doubles + (TOP_P if MODE == BY_MASS else TYPICAL_P))
            target = tl.where(is_first, share * tl.sum(totals, 0), tl.load(targets_ptr + entry))
            tl.store(targets_ptr + entry, target)
        # What lies in each part or above it, the parts in columns summed over the rows.
        from_each = tl.sum(tl.where(parts[:, None] >= parts[None, :], totals[:, None], 0.0), 0) + above
        # A sum made in other pieces than before may miss the target by a rounding: then all that is left is kept.
        lowest = tl.min(tl.where(totals > 0.0, parts, PARTS - 1), 0)
        chosen = tl.maximum(tl.max(tl.where(from_each >= target, parts, -1), 0), lowest)
        tl.store(above_ptr + entry, tl.sum(tl.where(parts > chosen, totals, 0.0), 0) + above)
        low += chosen.to(tl.uint32) << shift.to(tl.uint32)
        tl.store(floors_ptr + MODE * floors_stride + entry, low.to(tl.int32, bitcast=True))
