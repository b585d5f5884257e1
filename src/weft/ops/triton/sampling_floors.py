"""The floor of a filter on a line of scores: the lowest that top-k or top-p keeps, or the largest distance of typical-p.

No sorting: scores are whole numbers of the same order (`ordered`), and each pass over the line finds the next four bits of
the floor, from how many tokens, or how much probability, lie in each sixteenth of what is left:

    pass 1   |----.----.----.----| all numbers; the floor is in the part where the tokens above it come to be enough
    pass 2        |-.-.-.-|        that part; and so on, eight times (four where scores are bfloat16)
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.sampling import COLDEST_SINGLE, load_scores, ordered, surprise_keys

BY_COUNT: tl.constexpr = tl.constexpr(0)
BY_MASS: tl.constexpr = tl.constexpr(1)
BY_SURPRISE: tl.constexpr = tl.constexpr(2)
_PARTS: tl.constexpr = tl.constexpr(16)


@triton.jit
def are_kept(scores, relative, floors_by_count, floors_by_mass, log_min_p):
    """What top-k, top-p and min-p leave; `relative` to the best, over temperature."""
    keys = ordered(scores)
    return (keys >= floors_by_count) & (keys >= floors_by_mass) & (relative >= log_min_p)


@triton.jit
def find_floor(
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
        # Each tile is loaded while the one before it is counted.
        coming = load_scores(logits_line, scores_line, tl.arange(0, TILE), count, touched, TOUCHED)
        for start in range(0, count, TILE):
            places = start + tl.arange(0, TILE)
            scores = coming
            coming = load_scores(logits_line, scores_line, places + TILE, count, touched, TOUCHED)
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
                is_kept = is_kept & are_kept(scores, relative, by_count, by_mass, log_min_p)
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
    """Of what the other filters keep: its mass, and the expected relative score over temperature. A token's surprise less
    the entropy is the latter less its own."""
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
