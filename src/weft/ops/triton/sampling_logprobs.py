"""Logprobs of the unmodified logits, and the most likely tokens; at a tie the lowest token ids come first."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling import TOP_COUNT, is_last_to_arrive, ordered

_NOTHING: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def _ranked(scores, token_ids):
    """Score and token as one int64: larger for a more likely token, and at a tie for the lower id."""
    return ((ordered(scores).to(tl.int64) - 2147483648) << 32) | (2147483647 - token_ids).to(tl.int64)


@triton.jit
def _is_wanted(rows_ptr, words_ptr, row_words, entry, BY_ROW: tl.constexpr):
    """True if the entry needs logprobs. Without BY_ROW, every entry needs them."""
    if BY_ROW:
        row = tl.load(rows_ptr + entry)
        line = words_ptr + tl.maximum(row, 0).to(tl.int64) * row_words
        return (row >= 0) & (tl.load(line + TOP_COUNT) >= 0)
    return True


@triton.jit(do_not_specialize=["width"])
def logprobs_kernel(
    logits_ptr,
    tokens_ptr,
    rows_ptr,
    words_ptr,
    partial_masses_ptr,
    partial_best_ptr,
    partial_ranked_ptr,
    counters_ptr,
    logprobs_ptr,
    top_tokens_ptr,
    top_logprobs_ptr,
    vocabulary,
    logits_stride,
    row_words,
    pieces,
    width,
    BY_ROW: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The logprobs of each entry's token and of its `width` most likely tokens. Grid (entries, pieces). Each program
    finds the best tokens of its piece. The last program of an entry to arrive finds the best of all pieces. With BY_ROW,
    entries whose row needs no logprobs are skipped. Arrays of `width` values are [entries, WIDTH]."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    piece = tl.program_id(1)
    if _is_wanted(rows_ptr, words_ptr, row_words, entry, BY_ROW) == 0:
        return
    logits_line = logits_ptr + entry.to(tl.int64) * logits_stride
    token_ids = piece * TILE + tl.arange(0, TILE)
    inside = token_ids < vocabulary
    scores = tl.load(logits_line + token_ids, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.max(scores, 0)
    # If all tokens of the piece are forbidden, (minus infinity) - (minus infinity) would be NaN.
    reference = tl.where(best == float("-inf"), 0.0, best)
    place = entry * PIECES + piece
    tl.store(partial_best_ptr + place, best)
    tl.store(partial_masses_ptr + place, tl.sum(tl.exp(scores - reference), 0))
    ranked = tl.where(inside, _ranked(scores, token_ids), _NOTHING)
    for index in range(width):
        first = tl.max(ranked, 0)
        tl.store(partial_ranked_ptr + place.to(tl.int64) * WIDTH + index, first)
        ranked = tl.where(ranked == first, _NOTHING, ranked)
    if is_last_to_arrive(counters_ptr + entry, pieces):
        places = tl.arange(0, PIECES)
        is_piece = places < pieces
        all_best = tl.load(
            partial_best_ptr + entry * PIECES + places,
            mask=is_piece,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        masses = tl.load(
            partial_masses_ptr + entry * PIECES + places, mask=is_piece, other=0.0, cache_modifier=".cg"
        )
        overall = tl.max(all_best, 0)
        shares = tl.where(
            masses == 0.0, 0.0, masses.to(tl.float64) * tl.exp((all_best - overall).to(tl.float64))
        )
        normaliser = overall.to(tl.float64) + tl.log(tl.sum(shares, 0))
        token = tl.load(tokens_ptr + entry)
        score = tl.load(logits_line + token).to(tl.float32).to(tl.float64)
        tl.store(logprobs_ptr + entry, score - normaliser)
        items = tl.arange(0, PIECES * WIDTH)
        is_item = (items < pieces * WIDTH) & (items % WIDTH < width)
        candidates = tl.load(
            partial_ranked_ptr + entry.to(tl.int64) * PIECES * WIDTH + items,
            mask=is_item,
            other=_NOTHING,
            cache_modifier=".cg",
        )
        for index in range(width):
            first = tl.max(candidates, 0)
            candidates = tl.where(candidates == first, _NOTHING, candidates)
            token = 2147483647 - (first & 2147483647).to(tl.int32)
            score = tl.load(logits_line + token).to(tl.float32).to(tl.float64)
            tl.store(top_tokens_ptr + entry * WIDTH + index, token)
            tl.store(top_logprobs_ptr + entry * WIDTH + index, score - normaliser)
