"""Drawn tokens and the floors of top-k, top-p, min-p and typical-p, from a short list of the likeliest tokens.

    survey      the best score of every group of tokens, and the mass of every piece of the vocabulary: one read
    shortlist   one program an entry: a threshold from the groups' best, a list of the tokens that reach it, the floors of
                the filters and the winner of the draw on that list

The n-th best of the groups' best is reached by at least n tokens, and by few more. What the list cannot settle (it has
too little probability, or a token outside might have won) is done again on a longer one, and then on the whole line: that
takes long, and is for distributions so flat that thousands of tokens are kept. Drawing from a whole line is left to
`choose_kernel`, which has all processors.

No sorting: scores are whole numbers of the same order (`ordered`), and each pass over a list finds the next four bits of
a floor, from how many tokens, or how much probability, lie in each sixteenth of what is left. All is done in an order
that depends on nothing but the entry's own scores and parameters: company changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.backends import noise
from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling import (
    COLDEST,
    COLDEST_SINGLE,
    FLAGS,
    HAS_MIN_P,
    HAS_TOP_K,
    HAS_TOP_P,
    HAS_TYPICAL_P,
    LOG_MIN_P,
    PROMPT_LENGTH,
    SAW_FINITE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    gumbel_double,
    is_touched,
    load_scores,
    noise_bits,
    noise_key,
    noise_steps,
    ordered,
    surprise_keys,
)

BY_COUNT: tl.constexpr = tl.constexpr(0)
BY_MASS: tl.constexpr = tl.constexpr(1)
BY_SURPRISE: tl.constexpr = tl.constexpr(2)
_PARTS: tl.constexpr = tl.constexpr(16)

_GUMBEL_MAX: tl.constexpr = tl.constexpr(noise.GUMBEL_MAX + 1e-9)
# A token so far below the best (over temperature) hardly ever wins, nor matters to a filter.
_FAR: tl.constexpr = tl.constexpr(25.0)
_KEY_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(0x007FFFFF)


@triton.jit
def survey_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    words_ptr,
    doubles_ptr,
    mask_lines_ptr,
    maxima_ptr,
    sums_ptr,
    vocabulary,
    logits_stride,
    row_words,
    maxima_stride,
    sums_stride,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    MASSES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Of every group its best score, infinity where something is no number; of every piece of GROUPS groups, with MASSES,
    its best, its mass (sum of exponentials relative to that) and its moment. Grid (entries, pieces)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    temperature = tl.load(doubles_ptr + row.to(tl.int64) * (row_words // 2) + TEMPERATURE)
    if temperature <= 0.0:
        return
    flags = tl.load(words_ptr + row.to(tl.int64) * row_words + FLAGS)
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    groups = piece * GROUPS + tl.arange(0, GROUPS)
    token_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores = load_scores(
        logits_ptr + entry.to(tl.int64) * logits_stride,
        scores_ptr + entry.to(tl.int64) * vocabulary,
        token_ids,
        vocabulary,
        touched,
        TOUCHED,
    )
    maxima = tl.max(tl.where(scores != scores, float("inf"), scores), 1)
    tl.store(maxima_ptr + entry * maxima_stride + groups, maxima)
    if MASSES:
        best = tl.max(maxima, 0)
        heat = (1.0 / tl.maximum(temperature, COLDEST_SINGLE)).to(tl.float32)
        relative = (scores - tl.where(best == float("-inf"), 0.0, best)) * heat
        weights = tl.exp(relative)
        moments = tl.where(weights > 0.0, weights * relative, 0.0)
        place = sums_ptr + (entry * sums_stride + piece) * 3
        tl.store(place, best)
        tl.store(place + 1, tl.sum(tl.sum(weights, 1), 0))
        tl.store(place + 2, tl.sum(tl.sum(moments, 1), 0))


@triton.jit
def _score_of(key):
    """What `ordered` made the key from."""
    flipped = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(scores, relative, floors_by_count, floors_by_mass, log_min_p):
    """What top-k, top-p and min-p leave; `relative` to the best, over temperature."""
    keys = ordered(scores)
    return (keys >= floors_by_count) & (keys >= floors_by_mass) & (relative >= log_min_p)


@triton.jit
def _floor(
    logits_line,
    scores_line,
    count,
    touched,
    turns,
    best,
    temperature,
    by_count,
    by_mass,
    log_min_p,
    mean,
    reach,
    share,
    known_total,
    MODE: tl.constexpr,
    TOUCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """(floor by MODE of the `count` scores of a line, whether there is enough of them). `share` of the total mass is to
    be kept, where it is not negative of `known_total`; or that many tokens. BY_SURPRISE looks no further than `reach`."""
    heat = (1.0 / tl.maximum(temperature, COLDEST_SINGLE)).to(tl.float32)
    parts = tl.arange(0, _PARTS)
    low = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.float64)
    target = tl.zeros((), tl.float64)
    is_enough = count > 0
    shift = tl.full((), 28, tl.uint32)
    for turn in range(turns):
        sums = tl.zeros((_PARTS, TILE), tl.float32)
        for start in range(0, count, TILE):
            places = start + tl.arange(0, TILE)
            scores = load_scores(logits_line, scores_line, places, count, touched, TOUCHED)
            keys = ordered(scores)
            is_kept = (places < count) & (scores > float("-inf"))
            if MODE == BY_COUNT:
                weights = tl.full((TILE,), 1.0, tl.float32)
            else:
                weights = tl.exp((scores - best) * heat)
            if MODE == BY_MASS:
                is_kept = is_kept & (keys >= by_count)
            if MODE == BY_SURPRISE:
                relative = (scores - best).to(tl.float64) / temperature
                is_kept = is_kept & _kept(scores, relative, by_count, by_mass, log_min_p)
                keys = surprise_keys(scores, best, temperature, mean)
                is_kept = is_kept & (keys > reach)
            part = (keys - low) >> shift  # what is below wraps around and is in no part
            weights = tl.where(is_kept, weights, 0.0)
            sums += tl.where(part[None, :] == parts[:, None], weights[None, :], 0.0)
        totals = tl.sum(sums, 1).to(tl.float64)
        if turn == 0:
            total = tl.sum(totals, 0)
            if MODE == BY_COUNT:
                target = share
            else:
                target = share * tl.where(known_total >= 0.0, known_total, total)
            is_enough = total >= target
        # What lies in each part or above it, the parts in columns summed over the rows.
        from_each = tl.sum(tl.where(parts[:, None] >= parts[None, :], totals[:, None], 0.0), 0) + above
        # A sum made in other pieces than before may miss the target by a rounding: then all that is left is kept.
        lowest = tl.min(tl.where(totals > 0.0, parts, _PARTS - 1), 0)
        chosen = tl.maximum(tl.max(tl.where(from_each >= target, parts, -1), 0), lowest)
        above += tl.sum(tl.where(parts > chosen, totals, 0.0), 0)
        low += chosen.to(tl.uint32) << shift
        shift -= 4
    return low, is_enough


@triton.jit
def _mass_and_mean(
    logits_line,
    scores_line,
    count,
    touched,
    best,
    temperature,
    by_count,
    by_mass,
    log_min_p,
    TOUCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of what the other filters keep: its mass, and the expected relative score over temperature. A token's surprise less
    the entropy is the latter less its own."""
    masses = tl.zeros((TILE,), tl.float64)
    moments = tl.zeros((TILE,), tl.float64)
    for start in range(0, count, TILE):
        places = start + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, places, count, touched, TOUCHED)
        relative = (scores - best).to(tl.float64) / temperature
        is_kept = (scores > float("-inf")) & _kept(scores, relative, by_count, by_mass, log_min_p)
        mass = tl.where(is_kept, tl.exp(relative), 0.0)
        masses += mass
        moments += tl.where(mass > 0.0, mass * relative, 0.0)
    mass = tl.sum(masses, 0)
    return mass, tl.sum(moments, 0) / mass


@triton.jit
def shortlist_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    positions_ptr,
    words_ptr,
    integers_ptr,
    doubles_ptr,
    mask_lines_ptr,
    seen_ptr,
    maxima_ptr,
    sums_ptr,
    groups_ptr,
    list_scores_ptr,
    list_tokens_ptr,
    floors_ptr,
    best_ptr,
    mean_ptr,
    settled_ptr,
    tokens_ptr,
    errors_ptr,
    row_tokens_ptr,
    vocabulary,
    logits_stride,
    row_words,
    row_tokens_stride,
    floors_stride,
    maxima_stride,
    sums_stride,
    num_groups,
    pieces,
    first_wanted,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    HALVES: tl.constexpr,
    WITH_TOP_K: tl.constexpr,
    WITH_TOP_P: tl.constexpr,
    WITH_TYPICAL_P: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    GATHERED: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The token of each drawn entry whose list settles it; of the others, where they have filters, the floors. One
    program an entry. HALVES: logits are bfloat16, whose lower sixteen bits say nothing. WHOLE: which of the ATTEMPTS
    looks at the whole line; each one before it at a list four times as long as the last."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    flags = tl.load(row_ints + FLAGS)
    temperature = tl.load(row_doubles + TEMPERATURE)
    tl.store(settled_ptr + entry, 0)
    if temperature <= 0.0:
        return
    temperature = tl.maximum(temperature, COLDEST)
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    lanes = tl.arange(0, NUM_GROUPS)
    maxima = tl.load(maxima_ptr + entry * maxima_stride + lanes, mask=lanes < num_groups, other=float("-inf"))
    best = tl.max(maxima, 0)
    tl.store(best_ptr + entry, best)
    if (best == float("inf")) | (best == float("-inf")):
        return  # no token: choose_kernel says why
    if TOUCHED:
        if touched & (tl.load(seen_ptr + entry) != SAW_FINITE):
            return
    has_top_k = (flags & HAS_TOP_K) != 0
    has_top_p = (flags & HAS_TOP_P) != 0
    has_min_p = (flags & HAS_MIN_P) != 0
    has_typical_p = (flags & HAS_TYPICAL_P) != 0
    top_k = tl.load(row_ints + TOP_K)
    log_min_p = tl.load(row_doubles + LOG_MIN_P)
    seed = tl.load(integers_ptr + row.to(tl.int64) * (row_words // 2) + SEED)
    position = tl.load(positions_ptr + entry)
    noise_start = noise_key(seed, position - tl.load(row_ints + PROMPT_LENGTH))
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    changed_line = scores_ptr + entry.to(tl.int64) * vocabulary
    list_line = list_scores_ptr + entry * LIST
    list_tokens = list_tokens_ptr + entry * LIST
    total = tl.zeros((), tl.float64)
    whole_mean = tl.zeros((), tl.float64)
    if WITH_TOP_P or WITH_TYPICAL_P:
        piece_ids = tl.arange(0, PIECES)
        is_piece = piece_ids < pieces
        sums = sums_ptr + (entry * sums_stride + piece_ids) * 3
        piece_best = tl.load(sums, mask=is_piece, other=float("-inf"))
        masses = tl.load(sums + 1, mask=is_piece, other=0.0).to(tl.float64)
        moments = tl.load(sums + 2, mask=is_piece, other=0.0).to(tl.float64)
        below = (piece_best - best).to(tl.float64) / temperature
        factors = tl.where(masses > 0.0, tl.exp(below), 0.0)
        total = tl.sum(masses * factors, 0)
        shifted = tl.where(factors > 0.0, masses * below + moments, 0.0)
        whole_mean = tl.sum(shifted * factors, 0) / total

    keys = ordered(maxima)
    wanted = tl.where(has_top_k, top_k, first_wanted)
    is_settled = best != best
    for attempt in range(ATTEMPTS):
        if is_settled == 0:
            is_whole = attempt == WHOLE
            low = tl.zeros((), tl.uint32)
            count = tl.zeros((), tl.int32) + vocabulary
            if is_whole == 0:
                # The threshold, to sixteen bits: as many groups as are wanted reach it.
                bit = tl.full((), 0x80000000, tl.uint32)
                for _ in range(16):
                    higher = low | bit
                    reached = tl.sum((keys >= higher).to(tl.int32), 0)
                    low = tl.where(reached >= wanted, higher, low)
                    bit = bit >> 1
                far = ordered((best.to(tl.float64) - _FAR * temperature).to(tl.float32))
                low = tl.where(has_top_k, low, tl.maximum(low, far))
                # The groups that have a token above it, then those tokens.
                is_chosen = (keys >= low) & (maxima > float("-inf"))
                group_places = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
                tl.store(groups_ptr + entry * maxima_stride + group_places, lanes, mask=is_chosen)
                num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
                tl.debug_barrier()
                count = tl.zeros((), tl.int32)
                for start in range(0, num_chosen, GATHERED):
                    items = start + tl.arange(0, GATHERED)
                    groups = tl.load(
                        groups_ptr + entry * maxima_stride + items, mask=items < num_chosen, other=NUM_GROUPS
                    )
                    gathered_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                    gathered_ids = tl.reshape(gathered_ids, (GATHERED * GROUP,))
                    gathered_scores = load_scores(
                        logits_line, changed_line, gathered_ids, vocabulary, touched, TOUCHED
                    )
                    is_listed = (ordered(gathered_scores) >= low) & (gathered_scores > float("-inf"))
                    list_places = count + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                    is_stored = is_listed & (list_places < LIST)
                    tl.store(list_line + list_places, gathered_scores, mask=is_stored)
                    tl.store(list_tokens + list_places, gathered_ids, mask=is_stored)
                    count += tl.sum(is_listed.to(tl.int32), 0)
                tl.debug_barrier()
            fits = is_whole | (count <= LIST)
            # Whether all that may be kept is in the line.
            is_covered = is_whole | (low <= _KEY_OF_MINUS_INFINITY)
            reach_score = _score_of(tl.maximum(low, _KEY_OF_MINUS_INFINITY))
            reach_relative = (reach_score - best).to(tl.float64) / temperature
            line = list_line
            if is_whole:
                line = changed_line
            line_is_changed = (is_whole == 0) | touched
            turns = 8
            if HALVES:
                turns = tl.where(touched, 8, 4)
            by_count = tl.zeros((), tl.uint32)
            by_mass = tl.zeros((), tl.uint32)
            by_surprise = tl.zeros((), tl.uint32)
            mean = whole_mean
            if WITH_TOP_K:
                if has_top_k & fits:
                    by_count, is_enough = _floor(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        turns,
                        best,
                        temperature,
                        by_count,
                        by_mass,
                        log_min_p,
                        mean,
                        by_surprise,
                        top_k.to(tl.float64),
                        total,
                        MODE=BY_COUNT,
                        TOUCHED=True,
                        TILE=TILE,
                    )
                    is_covered = is_covered | is_enough
            if WITH_TOP_P:
                if has_top_p & fits:
                    by_mass, is_enough = _floor(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        turns,
                        best,
                        temperature,
                        by_count,
                        by_mass,
                        log_min_p,
                        mean,
                        by_surprise,
                        tl.load(row_doubles + TOP_P),
                        tl.where(is_covered, -1.0, total),
                        MODE=BY_MASS,
                        TOUCHED=True,
                        TILE=TILE,
                    )
                    is_covered = is_covered | is_enough
            is_covered = is_covered | (has_min_p & (reach_relative < log_min_p))
            if WITH_TYPICAL_P:
                if has_typical_p & fits:
                    reach = tl.zeros((), tl.uint32)
                    mass = total
                    # Where other filters did not cover it, what they keep is not known: a longer list is needed.
                    is_alone = (has_top_k | has_top_p | has_min_p) == 0
                    if is_covered:
                        mass, mean = _mass_and_mean(
                            logits_line,
                            line,
                            count,
                            line_is_changed,
                            best,
                            temperature,
                            by_count,
                            by_mass,
                            log_min_p,
                            TOUCHED=True,
                            TILE=TILE,
                        )
                    else:
                        reach = surprise_keys(reach_score, best, temperature, mean)
                    by_surprise, is_enough = _floor(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        8,
                        best,
                        temperature,
                        by_count,
                        by_mass,
                        log_min_p,
                        mean,
                        reach,
                        tl.load(row_doubles + TYPICAL_P),
                        tl.where(is_covered, -1.0, mass),
                        MODE=BY_SURPRISE,
                        TOUCHED=True,
                        TILE=TILE,
                    )
                    is_reached = is_alone & is_enough & (reach_relative <= mean)
                    is_covered = is_covered | is_reached
            if is_whole:
                tl.store(floors_ptr + entry, by_count.to(tl.int32, bitcast=True))
                tl.store(floors_ptr + floors_stride + entry, by_mass.to(tl.int32, bitcast=True))
                tl.store(floors_ptr + 2 * floors_stride + entry, by_surprise.to(tl.int32, bitcast=True))
                tl.store(mean_ptr + entry, mean)
            elif fits & (is_covered | ((flags & (HAS_TOP_K + HAS_TOP_P + HAS_MIN_P + HAS_TYPICAL_P)) == 0)):
                sums64 = tl.full((TILE,), float("-inf"), tl.float64)
                winners = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
                for start in range(0, count, TILE):
                    places = start + tl.arange(0, TILE)
                    inside = places < count
                    scores = tl.load(list_line + places, mask=inside, other=float("-inf"))
                    token_ids = tl.load(list_tokens + places, mask=inside, other=0x7FFFFFFF)
                    relative = (scores - best).to(tl.float64) / temperature
                    is_kept = inside & _kept(scores, relative, by_count, by_mass, log_min_p)
                    if WITH_TYPICAL_P:
                        surprise = surprise_keys(scores, best, temperature, mean)
                        is_kept = is_kept & ((surprise >= by_surprise) | (has_typical_p == 0))
                    exact = (scores.to(tl.float64) - best.to(tl.float64)) / temperature
                    exact += gumbel_double(noise_bits(noise_start, noise_steps(token_ids)))
                    exact = tl.where(is_kept, exact, float("-inf"))
                    # Tokens of a list stand in ascending order: of equals the first stays.
                    is_better = exact > sums64
                    sums64 = tl.where(is_better, exact, sums64)
                    winners = tl.where(is_better, token_ids, winners)
                highest = tl.max(sums64, 0)
                is_settled = is_covered | (highest > reach_relative + _GUMBEL_MAX)
                if is_settled:
                    token = tl.min(tl.where(sums64 == highest, winners, 0x7FFFFFFF), 0)
                    tl.store(settled_ptr + entry, 1)
                    tl.store(tokens_ptr + entry, token)
                    tl.store(errors_ptr + entry, 0)
                    tl.store(row_tokens_ptr + row.to(tl.int64) * row_tokens_stride + position, token)
                    if TOUCHED:
                        tl.store(seen_ptr + entry, 0)
            wanted = wanted * 4
