"""Chooses tokens on the device: the argmax of scores, or of scores plus noise.

The module also defines what the sampling kernels share: the memory layout of a row's parameters, and where the scores of
an entry are.

    entry e of a step -> rows[e] (-1: padding, skipped), positions[e] (the position of its new token)
    scores of e: its row of the logits, or of the workspace if masks, penalties or lists changed them ("touched")
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling_noise import gumbel_double, noise_bits, noise_key, noise_steps, race_single
from weft.request import PARAMETERS
from weft.sampling.words import flags_of

_PLACES = {name: place for place, name in enumerate(PARAMETERS)}
_NUM_DOUBLES = 1 + len(PARAMETERS)

# The parameters of a row: 64-bit fields, then 32-bit words, then its lists (bias values, bias tokens, end tokens).
SEED: tl.constexpr = tl.constexpr(0)
TEMPERATURE: tl.constexpr = tl.constexpr(1 + _PLACES["temperature"])
TOP_P: tl.constexpr = tl.constexpr(1 + _PLACES["top_p"])
TOP_K: tl.constexpr = tl.constexpr(1 + _PLACES["top_k"])
LOG_MIN_P: tl.constexpr = tl.constexpr(1 + _PLACES["min_p"])
TYPICAL_P: tl.constexpr = tl.constexpr(1 + _PLACES["typical_p"])
XTC_PROBABILITY: tl.constexpr = tl.constexpr(1 + _PLACES["xtc_probability"])
LOG_XTC_THRESHOLD: tl.constexpr = tl.constexpr(1 + _PLACES["xtc_threshold"])
REPETITION: tl.constexpr = tl.constexpr(1 + _PLACES["repetition_penalty"])
FREQUENCY: tl.constexpr = tl.constexpr(1 + _PLACES["frequency_penalty"])
PRESENCE: tl.constexpr = tl.constexpr(1 + _PLACES["presence_penalty"])
PROMPT_LENGTH: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES)
MIN_TOKENS: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 1)
NUM_BIASES: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 2)
NUM_ENDS: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 3)
HAS_GRAMMAR: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 4)
FLAGS: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 5)
TOP_COUNT: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 6)  # top logprobs; -1: no logprobs at all
HEADER: tl.constexpr = tl.constexpr(2 * _NUM_DOUBLES + 8)  # even, for the 64-bit values after it

# Bits of a row's flags: which sampling parameters it uses.
DRAWS: tl.constexpr = tl.constexpr(flags_of("temperature"))
HAS_TOP_K: tl.constexpr = tl.constexpr(flags_of("top_k"))
HAS_TOP_P: tl.constexpr = tl.constexpr(flags_of("top_p"))
HAS_MIN_P: tl.constexpr = tl.constexpr(flags_of("min_p"))
HAS_TYPICAL_P: tl.constexpr = tl.constexpr(flags_of("typical_p"))
HAS_XTC: tl.constexpr = tl.constexpr(flags_of("xtc_probability"))
HAS_REPETITION: tl.constexpr = tl.constexpr(flags_of("repetition_penalty"))
HAS_COUNTS: tl.constexpr = tl.constexpr(flags_of("frequency_penalty", "presence_penalty"))
HAS_LISTS: tl.constexpr = tl.constexpr(1 << len(PARAMETERS))  # logit_bias or min_tokens
FILTERS: tl.constexpr = tl.constexpr(
    flags_of(*(name for name, parameter in PARAMETERS.items() if parameter.stage == "filter"))
)
TOUCHES: tl.constexpr = tl.constexpr(HAS_REPETITION.value | HAS_COUNTS.value | HAS_LISTS.value)

# Kernels contain the code of these filters only if the step uses them: kernels are compiled per set of filters (`USED`).
COMPILED_FILTERS: tl.constexpr = tl.constexpr(
    HAS_TOP_K.value | HAS_TOP_P.value | HAS_TYPICAL_P.value | HAS_XTC.value
)
# Filters that need the probability mass of the row.
NEED_MASSES: tl.constexpr = tl.constexpr(HAS_TOP_P.value | HAS_TYPICAL_P.value | HAS_XTC.value)
NO_CEILING: tl.constexpr = tl.constexpr(0xFFFFFFFF)
NUM_FLOORS = 4  # of an entry: the floors of top-k, top-p and typical-p, and the ceiling of xtc

# Error codes: why an entry has no token.
NOT_A_NUMBER: tl.constexpr = tl.constexpr(1)
FORBIDDEN: tl.constexpr = tl.constexpr(2)
OVERFLOW: tl.constexpr = tl.constexpr(3)

# Flags: what the logits of an entry contained before anything changed them.
SAW_BAD: tl.constexpr = tl.constexpr(1)
SAW_FINITE: tl.constexpr = tl.constexpr(2)

# Smaller temperatures are computed as these. With them, score / temperature stays finite, and the token with the larger
# score is still chosen.
LOWEST_TEMPERATURE: tl.constexpr = tl.constexpr(1e-200)
LOWEST_TEMPERATURE_SINGLE: tl.constexpr = tl.constexpr(1e-38)

# Upper bounds of the single-precision error in the exponential race (see `choose_kernel`), with a margin.
_SLACK: tl.constexpr = tl.constexpr(1e-4)  # relative error
_ROOM: tl.constexpr = tl.constexpr(1e-3)  # absolute error of a base-2 logarithm

_NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(scores):
    """Maps float32 to uint32 in the same order; both zeros are equal."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (flipped ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def is_touched(flags, mask_lines_ptr, entry, MASKED: tl.constexpr):
    """True if something changes the logits of an entry, so that its scores are in the workspace."""
    touched = (flags & TOUCHES) != 0
    if MASKED:
        touched = touched | (tl.load(mask_lines_ptr + entry) >= 0)
    return touched


@triton.jit
def load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED: tl.constexpr):
    """The scores of an entry in float32; minus infinity past the end. TOUCHED: some entry of the step is touched."""
    inside = token_ids < vocabulary
    if TOUCHED:
        plain = tl.load(logits_line + token_ids, mask=inside & (touched == 0), other=float("-inf"))
        changed = tl.load(scores_line + token_ids, mask=inside & touched, other=float("-inf"))
        return tl.where(touched, changed, plain.to(tl.float32))
    return tl.load(logits_line + token_ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def is_last_to_arrive(counter_ptr, arrivals):
    """True in the last of `arrivals` programs to arrive. The last program sees what the others stored. The counter is
    reset for the next launch."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def surprise_keys(scores, best, temperature, mean):
    """Keys of tokens for typical-p, as uint32: larger if the surprise of a token is nearer to the expected surprise.
    `mean` is the expected relative score."""
    relative = (scores - best).to(tl.float64) / temperature
    surprise = tl.abs(mean - relative).to(tl.float32)
    return (0x7FFFFFFF - surprise.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)


@triton.jit
def load_floor(floor_ptr, is_set):
    """The floor of a filter; 0, which keeps all tokens, if the entry does not use the filter."""
    return tl.load(floor_ptr, mask=is_set, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def kept_by_filters(
    scores,
    flags,
    entry,
    row_doubles,
    floors_ptr,
    best_ptr,
    mean_ptr,
    floors_stride,
    USED: tl.constexpr,
):
    """True for each score that all filters of the entry keep.

    `floors_ptr` [NUM_FLOORS, entries]: the bounds of the filters, uint32 keys stored as int32.
    """
    by_count = load_floor(floors_ptr + entry, (flags & HAS_TOP_K) != 0)
    by_mass = load_floor(floors_ptr + floors_stride + entry, (flags & HAS_TOP_P) != 0)
    keys = ordered(scores)
    kept = (keys >= by_count) & (keys >= by_mass)
    if HAS_XTC & USED:
        if (flags & HAS_XTC) != 0:
            kept = kept & (keys <= load_floor(floors_ptr + 3 * floors_stride + entry, True))
    temperature = tl.load(row_doubles + TEMPERATURE)
    best = tl.load(best_ptr + entry)
    if (flags & HAS_MIN_P) != 0:
        lowest = tl.load(row_doubles + LOG_MIN_P) * temperature
        kept = kept & ((scores - best).to(tl.float64) >= lowest)
    if HAS_TYPICAL_P & USED:
        if (flags & HAS_TYPICAL_P) != 0:
            floor = load_floor(floors_ptr + 2 * floors_stride + entry, True)
            keys = surprise_keys(scores, best, temperature, tl.load(mean_ptr + entry))
            kept = kept & (keys >= floor) & (scores > float("-inf"))
    return kept


@triton.jit
def _candidates(
    logits_line,
    scores_line,
    token_ids,
    vocabulary,
    touched,
    flags,
    entry,
    row_doubles,
    floors_ptr,
    best_ptr,
    mean_ptr,
    floors_stride,
    TOUCHED: tl.constexpr,
    FILTERED: tl.constexpr,
    USED: tl.constexpr,
):
    """Returns the scores, and the scores with minus infinity for tokens that a filter removed."""
    scores = load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED)
    kept_scores = scores
    if FILTERED:
        kept = kept_by_filters(
            scores, flags, entry, row_doubles, floors_ptr, best_ptr, mean_ptr, floors_stride, USED
        )
        kept_scores = tl.where(kept, scores, float("-inf"))
    return scores, kept_scores


@triton.jit
def _race(best, best_noise, winners, is_close, scores, token_ids, bits, inverse_temperature):
    """One operation of the exponential race. Each lane compares its best token so far with a new token and keeps the
    better one. `is_close` records whether the two are too close for single precision."""
    noise = race_single(bits)
    needed = best_noise * tl.exp((scores - best) * inverse_temperature)
    is_better = noise < needed
    close = tl.abs(noise - needed) <= _SLACK * noise
    is_close = tl.where(is_better, close, is_close | close)
    best_noise = tl.where(is_better, noise, best_noise)
    best = tl.where(is_better, scores, best)
    winners = tl.where(is_better, token_ids, winners)
    return best, best_noise, winners, is_close


@triton.jit(do_not_specialize=["pieces", "tiles"])
def choose_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    positions_ptr,
    words_ptr,
    integers_ptr,
    doubles_ptr,
    mask_lines_ptr,
    floors_ptr,
    best_ptr,
    mean_ptr,
    seen_ptr,
    settled_ptr,
    partial_scores_ptr,
    partial_noise_ptr,
    partial_tokens_ptr,
    counters_ptr,
    tokens_ptr,
    errors_ptr,
    row_tokens_ptr,
    vocabulary,
    logits_stride,
    row_words,
    row_tokens_stride,
    floors_stride,
    pieces,
    tiles,
    DRAWS: tl.constexpr,
    TOUCHED: tl.constexpr,
    MASKED: tl.constexpr,
    FILTERED: tl.constexpr,
    USED: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
    PIECES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Chooses the token of each entry. Grid (entries, pieces). Each program finds the winner of its `tiles` x TILE
    tokens. The last program of an entry to arrive finds the winner of all pieces.

    The token with the largest score + Gumbel noise is the token with the smallest exponential noise / exp(score). The
    second form is cheaper to compute (the exponential race). Only differences of scores are divided by the
    temperature, so any small temperature works.

    The race is in single precision. If a second token is so close that the result may be wrong, the sums are computed
    in double precision. So the result does not depend on how the vocabulary is divided. Entries that
    `shortlist_kernel` settled are skipped.
    """
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    if FILTERED:
        if tl.load(settled_ptr + entry) != 0:
            return
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    row_ints = words_ptr + row.to(tl.int64) * row_words
    position = tl.load(positions_ptr + entry)
    flags = tl.load(row_ints + FLAGS)
    touched = is_touched(flags, mask_lines_ptr, entry, MASKED)
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    scores_line = scores_ptr + entry.to(tl.int64) * vocabulary
    temperature = tl.load(row_doubles + TEMPERATURE)
    is_drawn = temperature > 0.0
    temperature = tl.where(is_drawn, tl.maximum(temperature, LOWEST_TEMPERATURE), 1.0)
    inverse_temperature = (1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE_SINGLE)).to(tl.float32)
    inverse_temperature_of_2 = inverse_temperature * 1.4426950408889634
    seed = tl.load(integers_ptr + row.to(tl.int64) * (row_words // 2) + SEED)
    key = noise_key(seed, position - tl.load(row_ints + PROMPT_LENGTH))

    # Each lane keeps the best of its tokens.
    first = piece * tiles * TILE
    best = tl.full((TILE,), float("-inf"), tl.float32)
    winners = tl.full((TILE,), _NO_TOKEN, tl.int32)
    is_bad = tl.zeros((TILE,), tl.int1)
    greedy_tiles = tiles
    if DRAWS:
        greedy_tiles = tl.where(is_drawn, 0, tiles)
    for tile in range(greedy_tiles):
        token_ids = first + tile * TILE + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, token_ids, vocabulary, touched, TOUCHED)
        is_bad = is_bad | ((scores < float("inf")) == 0)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        winners = tl.where(is_better, token_ids, winners)
    reference = tl.max(best, 0)
    winner = tl.min(tl.where(best == reference, winners, _NO_TOKEN), 0)
    score = reference
    noise64 = tl.zeros((), tl.float64)
    if DRAWS:
        if is_drawn:
            lane_steps = noise_steps(tl.arange(0, TILE) - 1)
            best_noise = tl.full((TILE,), 1.0, tl.float32)
            is_close = tl.zeros((TILE,), tl.int1)
            head = tl.minimum(tiles, HEAD)
            for tile in range(head):
                token_ids = first + tile * TILE + tl.arange(0, TILE)
                scores, kept_scores = _candidates(
                    logits_line,
                    scores_line,
                    token_ids,
                    vocabulary,
                    touched,
                    flags,
                    entry,
                    row_doubles,
                    floors_ptr,
                    best_ptr,
                    mean_ptr,
                    floors_stride,
                    TOUCHED,
                    FILTERED,
                    USED,
                )
                is_bad = is_bad | ((scores < float("inf")) == 0)
                bits = noise_bits(key + noise_steps(first + tile * TILE), lane_steps)
                best, best_noise, winners, is_close = _race(
                    best, best_noise, winners, is_close, kept_scores, token_ids, bits, inverse_temperature
                )
            # In the remaining tiles, noise is computed only for the few tokens that may beat the best token of the
            # first tiles. The test is cheap: exponential noise is at least the uniform value that it is made from,
            # and the bits are that value times 2^32.
            leading = tl.max(best, 0)
            bound = tl.max(tl.exp((best - leading) * inverse_temperature) / best_noise, 0)
            most_bits = 32.0 + _ROOM - tl.log2(bound)
            rivals_of_leader = tl.full((TILE,), _NO_TOKEN, tl.int32)
            num_rivals = tl.zeros((TILE,), tl.int32)
            for tile in range(head, tiles):
                token_ids = first + tile * TILE + tl.arange(0, TILE)
                scores, kept_scores = _candidates(
                    logits_line,
                    scores_line,
                    token_ids,
                    vocabulary,
                    touched,
                    flags,
                    entry,
                    row_doubles,
                    floors_ptr,
                    best_ptr,
                    mean_ptr,
                    floors_stride,
                    TOUCHED,
                    FILTERED,
                    USED,
                )
                is_bad = is_bad | ((scores < float("inf")) == 0)
                bits = noise_bits(key + noise_steps(first + tile * TILE), lane_steps)
                may_win = bits.to(tl.float32) <= tl.exp2(
                    (kept_scores - leading) * inverse_temperature_of_2 + most_bits
                )
                num_rivals += may_win.to(tl.int32)
                rivals_of_leader = tl.where(may_win, token_ids, rivals_of_leader)
            # A lane remembers only its last rival. If a lane had several, all remaining tiles take part in the race;
            # otherwise only these rivals do.
            if (tl.max(num_rivals, 0) > 1) | (leading == float("-inf")):
                for tile in range(head, tiles):
                    token_ids = first + tile * TILE + tl.arange(0, TILE)
                    scores, kept_scores = _candidates(
                        logits_line,
                        scores_line,
                        token_ids,
                        vocabulary,
                        touched,
                        flags,
                        entry,
                        row_doubles,
                        floors_ptr,
                        best_ptr,
                        mean_ptr,
                        floors_stride,
                        TOUCHED,
                        FILTERED,
                        USED,
                    )
                    bits = noise_bits(key + noise_steps(first + tile * TILE), lane_steps)
                    best, best_noise, winners, is_close = _race(
                        best, best_noise, winners, is_close, kept_scores, token_ids, bits, inverse_temperature
                    )
            elif head < tiles:
                token_ids = rivals_of_leader
                scores, kept_scores = _candidates(
                    logits_line,
                    scores_line,
                    token_ids,
                    vocabulary,
                    touched,
                    flags,
                    entry,
                    row_doubles,
                    floors_ptr,
                    best_ptr,
                    mean_ptr,
                    floors_stride,
                    TOUCHED,
                    FILTERED,
                    USED,
                )
                bits = noise_bits(key, noise_steps(token_ids))
                best, best_noise, winners, is_close = _race(
                    best, best_noise, winners, is_close, kept_scores, token_ids, bits, inverse_temperature
                )

            reference = tl.max(best, 0)
            if reference > float("-inf"):
                quotients = tl.exp((best - reference) * inverse_temperature) / best_noise
                top = tl.max(quotients, 0)
                rivals = quotients >= top * (1.0 - _SLACK)
                winner = tl.min(tl.where(quotients == top, winners, _NO_TOKEN), 0)
                if (tl.sum(rivals.to(tl.int32), 0) > 1) | (tl.sum((rivals & is_close).to(tl.int32), 0) > 0):
                    exact = tl.full((TILE,), float("-inf"), tl.float64)
                    for tile in range(tiles):
                        token_ids = first + tile * TILE + tl.arange(0, TILE)
                        scores, kept_scores = _candidates(
                            logits_line,
                            scores_line,
                            token_ids,
                            vocabulary,
                            touched,
                            flags,
                            entry,
                            row_doubles,
                            floors_ptr,
                            best_ptr,
                            mean_ptr,
                            floors_stride,
                            TOUCHED,
                            FILTERED,
                            USED,
                        )
                        sums64 = (kept_scores.to(tl.float64) - reference.to(tl.float64)) / temperature
                        sums64 += gumbel_double(noise_bits(key, noise_steps(token_ids)))
                        is_better = sums64 > exact
                        exact = tl.where(is_better, sums64, exact)
                        winners = tl.where(is_better, token_ids, winners)
                    winner = tl.min(tl.where(exact == tl.max(exact, 0), winners, _NO_TOKEN), 0)
                score = load_scores(logits_line, scores_line, winner, vocabulary, touched, TOUCHED)
                noise64 = gumbel_double(noise_bits(key, noise_steps(winner)))
    # NaN as noise tells the last program that this piece has a bad score.
    noise64 = tl.where(tl.sum(is_bad.to(tl.int32), 0) > 0, float("nan"), noise64)

    place = entry * PIECES + piece
    tl.store(partial_scores_ptr + place, score)
    tl.store(partial_noise_ptr + place, noise64)
    tl.store(partial_tokens_ptr + place, winner)
    if is_last_to_arrive(counters_ptr + entry, pieces):
        places = entry * PIECES + tl.arange(0, PIECES)
        inside = tl.arange(0, PIECES) < pieces
        # Other programs stored these values: bypass the L1 cache, which may hold older ones.
        piece_scores = tl.load(
            partial_scores_ptr + places, mask=inside, other=float("-inf"), cache_modifier=".cg"
        )
        piece_noise = tl.load(partial_noise_ptr + places, mask=inside, other=0.0, cache_modifier=".cg")
        piece_winners = tl.load(
            partial_tokens_ptr + places, mask=inside, other=_NO_TOKEN, cache_modifier=".cg"
        )
        bad = tl.sum((piece_noise != piece_noise).to(tl.int32), 0) > 0
        highest = tl.max(piece_scores, 0)
        is_empty = highest == float("-inf")
        below = piece_scores.to(tl.float64) - tl.where(is_empty, 0.0, highest).to(tl.float64)
        totals = below / temperature + piece_noise
        token = tl.min(tl.where(totals == tl.max(totals, 0), piece_winners, _NO_TOKEN), 0)
        error = tl.where(bad | is_empty, NOT_A_NUMBER, 0)
        if TOUCHED:
            seen = tl.load(seen_ptr + entry)
            tl.store(seen_ptr + entry, 0)
            changed = tl.where(bad, OVERFLOW, tl.where(is_empty, FORBIDDEN, 0))
            error = tl.where(touched & (seen == SAW_FINITE), changed, tl.where(touched, NOT_A_NUMBER, error))
        token = tl.where(error == 0, token, 0)
        tl.store(tokens_ptr + entry, token)
        tl.store(errors_ptr + entry, error)
        tl.store(row_tokens_ptr + row.to(tl.int64) * row_tokens_stride + position, token)
