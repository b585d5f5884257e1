"""The floor of a filter on a row of scores: the lowest key of a token that the filter keeps.

A key is a uint32. For top-k and top-p, larger scores have larger keys (`ordered`). For typical-p, tokens nearer to the
expected surprise have larger keys (`surprise_keys`). A filter keeps the largest keys, until their number or their
probability mass reaches a target.

The row is not sorted. Each pass over the row finds the next four bits of the floor. It divides the remaining range of
keys into 16 parts and adds up the number or the mass of the tokens in each part. From the largest key down, the floor
is in the part in which the sum reaches the target:

    pass 1   |----.----.----.----|   the range is all keys
    pass 2        |-.-.-.-|          the range is the part that contains the floor
    ...                              8 passes for 32 bits; 4 passes for bfloat16 scores, whose low 16 bits are zero
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.sampling import (
    LOWEST_TEMPERATURE_SINGLE,
    NO_CEILING,
    load_scores,
    ordered,
    surprise_keys,
)

BY_COUNT: tl.constexpr = tl.constexpr(0)
BY_MASS: tl.constexpr = tl.constexpr(1)
BY_SURPRISE: tl.constexpr = tl.constexpr(2)
_PARTS: tl.constexpr = tl.constexpr(16)


@triton.jit
def are_kept(scores, relative, floors_by_count, floors_by_mass, log_min_p):
    """The tokens that top-k, top-p and min-p keep. `relative` is (score - best score) / temperature."""
    keys = ordered(scores)
    return (keys >= floors_by_count) & (keys >= floors_by_mass) & (relative >= log_min_p)


@triton.jit
def find_floor(
    logits_line,
    scores_line,
    count,
    touched,
    passes,
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
    """Returns the floor of `count` scores, and whether these scores reach the target.

    BY_COUNT (top-k): the target is `share` tokens.
    BY_MASS (top-p): the target is the fraction `share` of the probability mass, of the tokens that top-k keeps.
    BY_SURPRISE (typical-p): the same, of the tokens that top-k, top-p and min-p keep. Keys up to `reach` are ignored:
    a list of the most likely tokens may lack tokens with such keys.

    The mass is `known_total`, or the sum over the scores if `known_total` is negative."""
    inverse_temperature = (1.0 / tl.maximum(temperature, LOWEST_TEMPERATURE_SINGLE)).to(tl.float32)
    parts = tl.arange(0, _PARTS)
    low = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.float64)
    target = tl.zeros((), tl.float64)
    is_enough = count > 0
    shift = tl.full((), 28, tl.uint32)
    for pass_index in range(passes):
        sums = tl.zeros((_PARTS, TILE), tl.float32)
        # Each tile is loaded while the previous one is counted.
        next_scores = load_scores(logits_line, scores_line, tl.arange(0, TILE), count, touched, TOUCHED)
        for start in range(0, count, TILE):
            places = start + tl.arange(0, TILE)
            scores = next_scores
            next_scores = load_scores(logits_line, scores_line, places + TILE, count, touched, TOUCHED)
            keys = ordered(scores)
            is_kept = (places < count) & (scores > float("-inf"))
            if MODE == BY_COUNT:
                weights = tl.full((TILE,), 1.0, tl.float32)
            else:
                weights = tl.exp((scores - best) * inverse_temperature)
            if MODE == BY_MASS:
                is_kept = is_kept & (keys >= by_count)
            if MODE == BY_SURPRISE:
                relative = (scores - best).to(tl.float64) / temperature
                is_kept = is_kept & are_kept(scores, relative, by_count, by_mass, log_min_p)
                keys = surprise_keys(scores, best, temperature, mean)
                is_kept = is_kept & (keys > reach)
            part = (keys - low) >> shift  # keys below `low` wrap around: they are in no part
            weights = tl.where(is_kept, weights, 0.0)
            sums += tl.where(part[None, :] == parts[:, None], weights[None, :], 0.0)
        totals = tl.sum(sums, 1).to(tl.float64)
        if pass_index == 0:
            total = tl.sum(totals, 0)
            if MODE == BY_COUNT:
                target = share
            else:
                target = share * tl.where(known_total >= 0.0, known_total, total)
            is_enough = total >= target
        # from_each[j] is the sum of part j and all parts above it.
        from_each = tl.sum(tl.where(parts[:, None] >= parts[None, :], totals[:, None], 0.0), 0) + above
        # The highest part whose sum reaches the target is chosen. Each pass adds in another order, so rounding errors
        # can leave the sum of all parts below the target. Then the lowest part with tokens is chosen.
        lowest = tl.min(tl.where(totals > 0.0, parts, _PARTS - 1), 0)
        chosen = tl.maximum(tl.max(tl.where(from_each >= target, parts, -1), 0), lowest)
        above += tl.sum(tl.where(parts > chosen, totals, 0.0), 0)
        low += chosen.to(tl.uint32) << shift
        shift -= 4
    return low, is_enough


@triton.jit
def mass_and_mean(
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
    """Returns the probability mass of the tokens that top-k, top-p and min-p keep, and the mean of their relative
    scores.

    A relative score is (score - best score) / temperature. The mean is weighted by probability. Typical-p needs it:
    surprise - entropy = mean - relative score."""
    masses = tl.zeros((TILE,), tl.float64)
    moments = tl.zeros((TILE,), tl.float64)
    for start in range(0, count, TILE):
        places = start + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, places, count, touched, TOUCHED)
        relative = (scores - best).to(tl.float64) / temperature
        is_kept = (scores > float("-inf")) & are_kept(scores, relative, by_count, by_mass, log_min_p)
        mass = tl.where(is_kept, tl.exp(relative), 0.0)
        masses += mass
        moments += tl.where(mass > 0.0, mass * relative, 0.0)
    mass = tl.sum(masses, 0)
    return mass, tl.sum(moments, 0) / mass


@triton.jit
def find_ceiling(
    logits_line,
    scores_line,
    count,
    touched,
    best,
    temperature,
    by_count,
    by_mass,
    log_min_p,
    mean,
    by_surprise,
    log_threshold,
    known_total,
    TOUCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finds the ceiling of xtc among the tokens that the other filters keep.

    Returns the lowest key of a token with at least the probability of the threshold, and the relative score that has
    exactly this probability. The mass of the tokens is `known_total`, or their sum if `known_total` is negative."""
    total = known_total
    if known_total < 0.0:
        masses = tl.zeros((TILE,), tl.float64)
        for start in range(0, count, TILE):
            places = start + tl.arange(0, TILE)
            scores = load_scores(logits_line, scores_line, places, count, touched, TOUCHED)
            relative = (scores - best).to(tl.float64) / temperature
            is_kept = (scores > float("-inf")) & are_kept(scores, relative, by_count, by_mass, log_min_p)
            is_kept = is_kept & (surprise_keys(scores, best, temperature, mean) >= by_surprise)
            masses += tl.where(is_kept, tl.exp(relative), 0.0)
        total = tl.sum(masses, 0)
    limit = tl.log(total) + log_threshold
    lowest = tl.full((TILE,), NO_CEILING, tl.uint32)
    for start in range(0, count, TILE):
        places = start + tl.arange(0, TILE)
        scores = load_scores(logits_line, scores_line, places, count, touched, TOUCHED)
        relative = (scores - best).to(tl.float64) / temperature
        is_kept = (relative >= limit) & are_kept(scores, relative, by_count, by_mass, log_min_p)
        is_kept = is_kept & (surprise_keys(scores, best, temperature, mean) >= by_surprise)
        lowest = tl.minimum(lowest, tl.where(is_kept, ordered(scores), lowest))
    return tl.min(lowest, 0), limit
