"""Top-k, top-p, min-p, typical-p and xtc: finds the tokens that these filters keep, and samples one of them. Both
steps use a list of the most likely tokens only. The row is not sorted.

    survey      reads the scores once. It finds the best score of every group of tokens, and the mass of every piece of
                the vocabulary.
    shortlist   one program per entry. It finds a threshold from the maxima of the groups and lists the tokens that
                reach it. From this list it finds the floor of each filter (the lowest score that it keeps), then
                samples a token.

The threshold is the n-th best group maximum. At least n tokens reach it, and rarely many more. If thousands of tokens
have similar probabilities, a list may lack tokens that the filters keep. Then a longer list is made. If that fails too,
the floors are found on the whole row of scores, which is slow. `choose_kernel` then samples the token, because it uses
all multiprocessors.

The order of all operations depends only on the scores and parameters of the entry. Other entries change nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling import (
    FILTERS,
    FLAGS,
    HAS_MIN_P,
    HAS_TOP_K,
    HAS_TOP_P,
    HAS_TYPICAL_P,
    HAS_XTC,
    LOG_MIN_P,
    LOG_XTC_THRESHOLD,
    LOWEST_TEMPERATURE,
    LOWEST_TEMPERATURE_SINGLE,
    NEED_MASSES,
    NO_CEILING,
    PROMPT_LENGTH,
    SAW_FINITE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    XTC_PROBABILITY,
    is_touched,
    load_scores,
    ordered,
    surprise_keys,
)
from weft.ops.triton.sampling_floors import (
    BY_COUNT,
    BY_MASS,
    BY_SURPRISE,
    are_kept,
    find_ceiling,
    find_floor,
    mass_and_mean,
)
from weft.ops.triton.sampling_noise import gumbel_double, noise_bits, noise_key, noise_steps

# Attempts: a list from the best groups, then a list from nearly all groups, then the whole row.
_ATTEMPTS: tl.constexpr = tl.constexpr(3)

# A token that is this many times the temperature below the best score hardly matters for filters by probability.
_NEGLIGIBLE_BELOW: tl.constexpr = tl.constexpr(25.0)
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
    num_groups,
    pieces,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    MASSES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Stores the best score of every group (infinity if a score is NaN). Grid (entries, pieces); a piece has GROUPS
    groups.

    With MASSES, also stores three values per piece: its best score, its mass and its moment. The mass is the sum of
    exp(relative score), with scores relative to the best of the piece. The moment is the sum of relative score x
    exp(relative score)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    flags = tl.load(words_ptr + row.to(tl.int64) * row_words + FLAGS)
    if (flags & FILTERS) == 0:
        return
    temperature = tl.load(doubles_ptr + row.to(tl.int64) * (row_words // 2) + TEMPERATURE)
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
    tl.store(maxima_ptr + entry * num_groups + groups, maxima)
    if MASSES:
        best = tl.max(maxima, 0)
        inverse_temperature = (1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE_SINGLE)).to(tl.float32)
        relative = (scores - tl.where(best == float("-inf"), 0.0, best)) * inverse_temperature
        weights = tl.exp(relative)
        moments = tl.where(weights > 0.0, weights * relative, 0.0)
        place = sums_ptr + (entry * pieces + piece) * 3
        tl.store(place, best)
        tl.store(place + 1, tl.sum(tl.sum(weights, 1), 0))
        tl.store(place + 2, tl.sum(tl.sum(moments, 1), 0))


@triton.jit
def _score_of(key):
    """The inverse of `ordered`."""
    flipped = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
    num_groups,
    pieces,
    few_groups,
    most_groups,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    HALVES: tl.constexpr,
    USED: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    GATHERED: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """For each entry with filters: makes a list of the most likely tokens and samples from it. If no list holds all
    tokens that the filters keep, finds only the floors. One program per entry.

    HALVES: logits are bfloat16, so the low sixteen bits are zero."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    flags = tl.load(row_ints + FLAGS)
    tl.store(settled_ptr + entry, 0)
    if (flags & FILTERS) == 0:
        return
    temperature = tl.maximum(tl.load(row_doubles + TEMPERATURE), LOWEST_TEMPERATURE)
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    lanes = tl.arange(0, NUM_GROUPS)
    maxima = tl.load(maxima_ptr + entry * num_groups + lanes, mask=lanes < num_groups, other=float("-inf"))
    best = tl.max(maxima, 0)
    tl.store(best_ptr + entry, best)
    if (best == float("inf")) | (best == float("-inf")):
        return  # the entry has no token; choose_kernel reports why
    if TOUCHED:
        if touched & (tl.load(seen_ptr + entry) != SAW_FINITE):
            return
    has_top_k = (flags & HAS_TOP_K) != 0
    has_top_p = (flags & HAS_TOP_P) != 0
    has_min_p = (flags & HAS_MIN_P) != 0
    has_typical_p = (flags & HAS_TYPICAL_P) != 0
    top_k = tl.load(row_doubles + TOP_K).to(tl.int32)
    log_min_p = tl.load(row_doubles + LOG_MIN_P)
    seed = tl.load(integers_ptr + row.to(tl.int64) * (row_words // 2) + SEED)
    position = tl.load(positions_ptr + entry)
    noise_start = noise_key(seed, position - tl.load(row_ints + PROMPT_LENGTH))
    has_xtc = (flags & HAS_XTC) != 0
    xtc_is_alone = (flags & FILTERS) == HAS_XTC
    ceiling_ptr = floors_ptr + 3 * floors_stride + entry
    if HAS_XTC & USED:
        # Whether xtc applies is random. The random number is the noise of token -1, which no token has.
        bits = noise_bits(noise_start, tl.zeros((), tl.uint64))
        uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        has_xtc = has_xtc & (uniform < tl.load(row_doubles + XTC_PROBABILITY))
        tl.store(ceiling_ptr, -1)  # the bits of NO_CEILING
        if xtc_is_alone & (has_xtc == 0):
            return
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    changed_line = scores_ptr + entry.to(tl.int64) * vocabulary
    list_line = list_scores_ptr + entry * LIST
    list_tokens = list_tokens_ptr + entry * LIST
    total = tl.zeros((), tl.float64)
    whole_mean = tl.zeros((), tl.float64)
    if NEED_MASSES & USED:
        piece_ids = tl.arange(0, PIECES)
        is_piece = piece_ids < pieces
        sums = sums_ptr + (entry * pieces + piece_ids) * 3
        piece_best = tl.load(sums, mask=is_piece, other=float("-inf"))
        masses = tl.load(sums + 1, mask=is_piece, other=0.0).to(tl.float64)
        moments = tl.load(sums + 2, mask=is_piece, other=0.0).to(tl.float64)
        below = (piece_best - best).to(tl.float64) / temperature
        factors = tl.where(masses > 0.0, tl.exp(below), 0.0)
        total = tl.sum(masses * factors, 0)
        shifted = tl.where(factors > 0.0, masses * below + moments, 0.0)
        whole_mean = tl.sum(shifted * factors, 0) / total

    keys = ordered(maxima)
    min_groups = tl.where(has_top_k, top_k, few_groups)
    is_settled = best != best  # False, as a tensor: `best` is not NaN
    for attempt in range(_ATTEMPTS):
        if is_settled == 0:
            is_whole = attempt == _ATTEMPTS - 1
            low = tl.zeros((), tl.uint32)
            count = tl.zeros((), tl.int32) + vocabulary
            if is_whole == 0:
                # The upper sixteen bits of the highest threshold that at least `min_groups` groups reach.
                bit = tl.full((), 0x80000000, tl.uint32)
                for _ in range(16):
                    higher = low | bit
                    reached = tl.sum((keys >= higher).to(tl.int32), 0)
                    low = tl.where(reached >= min_groups, higher, low)
                    bit = bit >> 1
                negligible = ordered((best.to(tl.float64) - _NEGLIGIBLE_BELOW * temperature).to(tl.float32))
                low = tl.where(has_top_k, low, tl.maximum(low, negligible))
                # Collect the groups whose best token reaches the threshold, then their tokens that reach it.
                is_chosen = (keys >= low) & (maxima > float("-inf"))
                group_places = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
                tl.store(groups_ptr + entry * num_groups + group_places, lanes, mask=is_chosen)
                num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
                tl.debug_barrier()
                count = tl.zeros((), tl.int32)
                for start in range(0, num_chosen, GATHERED):
                    items = start + tl.arange(0, GATHERED)
                    groups = tl.load(
                        groups_ptr + entry * num_groups + items, mask=items < num_chosen, other=NUM_GROUPS
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
            # True if the list or row contains all tokens that may be kept.
            is_covered = is_whole | (low <= _KEY_OF_MINUS_INFINITY)
            # The list has every token with at least this score.
            reach_score = _score_of(tl.maximum(low, _KEY_OF_MINUS_INFINITY))
            reach_relative = (reach_score - best).to(tl.float64) / temperature
            line = list_line
            if is_whole:
                line = changed_line
            line_is_changed = (is_whole == 0) | touched
            passes = 8
            if HALVES:
                passes = tl.where(touched, 8, 4)
            by_count = tl.zeros((), tl.uint32)
            by_mass = tl.zeros((), tl.uint32)
            by_surprise = tl.zeros((), tl.uint32)
            mean = whole_mean
            if HAS_TOP_K & USED:
                if has_top_k & fits:
                    by_count, is_enough = find_floor(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        passes,
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
            if HAS_TOP_P & USED:
                if has_top_p & fits:
                    by_mass, is_enough = find_floor(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        passes,
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
            if HAS_TYPICAL_P & USED:
                if has_typical_p & fits:
                    reach = tl.zeros((), tl.uint32)
                    mass = total
                    # If there are other filters and the list lacks tokens that they keep, a longer list is needed. If
                    # typical-p is the only filter, the list may still have all tokens that it keeps.
                    is_alone = (has_top_k | has_top_p | has_min_p) == 0
                    if is_covered:
                        mass, mean = mass_and_mean(
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
                    by_surprise, is_enough = find_floor(
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
            ceiling = tl.full((), NO_CEILING, tl.uint32)
            if HAS_XTC & USED:
                if has_xtc & fits & (is_covered | xtc_is_alone):
                    ceiling, limit = find_ceiling(
                        logits_line,
                        line,
                        count,
                        line_is_changed,
                        best,
                        temperature,
                        by_count,
                        by_mass,
                        log_min_p,
                        mean,
                        by_surprise,
                        tl.load(row_doubles + LOG_XTC_THRESHOLD),
                        tl.where(xtc_is_alone, total, -1.0),
                        TOUCHED=True,
                        TILE=TILE,
                    )
                    tl.store(ceiling_ptr, ceiling.to(tl.int32, bitcast=True))
                    # If xtc is the only filter, nearly all tokens are kept, so `choose_kernel` samples and not this
                    # kernel. The short list then only has to hold all tokens that xtc may remove.
                    is_settled = xtc_is_alone & (is_covered == 0) & (reach_relative <= limit)
            if is_whole:
                tl.store(floors_ptr + entry, by_count.to(tl.int32, bitcast=True))
                tl.store(floors_ptr + floors_stride + entry, by_mass.to(tl.int32, bitcast=True))
                tl.store(floors_ptr + 2 * floors_stride + entry, by_surprise.to(tl.int32, bitcast=True))
                tl.store(mean_ptr + entry, mean)
            elif fits & is_covered:
                sums64 = tl.full((TILE,), float("-inf"), tl.float64)
                winners = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
                for start in range(0, count, TILE):
                    places = start + tl.arange(0, TILE)
                    inside = places < count
                    scores = tl.load(list_line + places, mask=inside, other=float("-inf"))
                    token_ids = tl.load(list_tokens + places, mask=inside, other=0x7FFFFFFF)
                    relative = (scores - best).to(tl.float64) / temperature
                    is_kept = inside & are_kept(scores, relative, by_count, by_mass, log_min_p)
                    if HAS_TYPICAL_P & USED:
                        surprise = surprise_keys(scores, best, temperature, mean)
                        is_kept = is_kept & ((surprise >= by_surprise) | (has_typical_p == 0))
                    if HAS_XTC & USED:
                        is_kept = is_kept & (ordered(scores) <= ceiling)
                    exact = (scores.to(tl.float64) - best.to(tl.float64)) / temperature
                    exact += gumbel_double(noise_bits(noise_start, noise_steps(token_ids)))
                    exact = tl.where(is_kept, exact, float("-inf"))
                    # A list is in ascending order of token ids: at a tie, the first token stays.
                    is_better = exact > sums64
                    sums64 = tl.where(is_better, exact, sums64)
                    winners = tl.where(is_better, token_ids, winners)
                highest = tl.max(sums64, 0)
                is_settled = is_covered
                token = tl.min(tl.where(sums64 == highest, winners, 0x7FFFFFFF), 0)
                tl.store(settled_ptr + entry, 1)
                tl.store(tokens_ptr + entry, token)
                tl.store(errors_ptr + entry, 0)
                tl.store(row_tokens_ptr + row.to(tl.int64) * row_tokens_stride + position, token)
                if TOUCHED:
                    tl.store(seen_ptr + entry, 0)
            # The next attempt makes a longer list.
            min_groups = tl.maximum(min_groups, most_groups)
