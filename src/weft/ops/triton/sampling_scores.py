"""Changes the scores of an entry before a token is chosen: grammar masks, penalties, logit_bias and min_tokens.

An entry without changes uses its logits and costs nothing here. Any other entry gets a row of float32 scores in a
workspace. The order of programs does not matter: counts are integers, and programs that store to the same address store
the same value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.triton.device import let_next_begin, wait_for_previous
from weft.ops.triton.sampling import (
    FLAGS,
    FREQUENCY,
    HAS_COUNTS,
    HAS_GRAMMAR,
    HAS_LISTS,
    HAS_REPETITION,
    HEADER,
    MIN_TOKENS,
    NUM_BIASES,
    NUM_ENDS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SAW_BAD,
    SAW_FINITE,
    is_touched,
)


@triton.jit
def _masked(scores, token_ids, inside, masks_ptr, mask_words, line):
    """Sets the scores of tokens that the grammar of the entry forbids to minus infinity. Without a grammar (`line` is
    negative), the scores stay as they are."""
    words = tl.load(
        masks_ptr + tl.maximum(line, 0).to(tl.int64) * mask_words + token_ids // 32,
        mask=inside & (line >= 0),
        other=-1,
    )
    return tl.where(((words >> (token_ids % 32)) & 1) != 0, scores, scores + float("-inf"))


@triton.jit
def copy_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    words_ptr,
    masks_ptr,
    mask_lines_ptr,
    seen_ptr,
    vocabulary,
    logits_stride,
    row_words,
    mask_words,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copies logits to the workspace, applies grammar masks, and records whether scores are finite or bad. Grid
    (entries, tiles)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    flags = tl.load(words_ptr + row.to(tl.int64) * row_words + FLAGS)
    if is_touched(flags, mask_lines_ptr, entry, MASKED) == 0:
        return
    token_ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token_ids < vocabulary
    scores = tl.load(
        logits_ptr + entry.to(tl.int64) * logits_stride + token_ids, mask=inside, other=float("-inf")
    ).to(tl.float32)
    is_bad = (scores != scores) | (scores == float("inf"))
    is_finite = (is_bad == 0) & (scores > float("-inf"))
    seen = tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, SAW_BAD, 0)
    seen += tl.where(tl.max(is_finite.to(tl.int32), 0) > 0, SAW_FINITE, 0)
    tl.atomic_or(seen_ptr + entry, seen)
    if MASKED:
        line = tl.load(mask_lines_ptr + entry)
        scores = _masked(scores, token_ids, inside, masks_ptr, mask_words, line)
    tl.store(scores_ptr + entry.to(tl.int64) * vocabulary + token_ids, scores, mask=inside)


@triton.jit
def count_kernel(
    rows_ptr,
    positions_ptr,
    words_ptr,
    row_tokens_ptr,
    counts_ptr,
    vocabulary,
    row_words,
    row_tokens_stride,
    CLEARS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Counts how often each token was generated. All counts must be zero before. With CLEARS, sets the counts to zero
    again instead. Grid (entries, any number of programs)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    if (tl.load(row_ints + FLAGS) & HAS_COUNTS) == 0:
        return
    position = tl.load(positions_ptr + entry)
    prompt_length = tl.load(row_ints + PROMPT_LENGTH)
    counts_line = counts_ptr + entry.to(tl.int64) * vocabulary
    stride = tl.num_programs(1) * TILE
    for start in range(prompt_length + tl.program_id(1) * TILE, position, stride):
        places = start + tl.arange(0, TILE)
        inside = places < position
        tokens = tl.load(row_tokens_ptr + row.to(tl.int64) * row_tokens_stride + places, mask=inside, other=0)
        if CLEARS:
            tl.store(counts_line + tokens, tl.zeros((TILE,), tl.int32), mask=inside)
        else:
            tl.atomic_add(counts_line + tokens, tl.full((TILE,), 1, tl.int32), mask=inside)


@triton.jit
def penalise_kernel(
    logits_ptr,
    scores_ptr,
    rows_ptr,
    positions_ptr,
    words_ptr,
    doubles_ptr,
    row_tokens_ptr,
    counts_ptr,
    masks_ptr,
    mask_lines_ptr,
    vocabulary,
    logits_stride,
    row_words,
    row_tokens_stride,
    mask_words,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes the penalised scores of all tokens so far. A token that occurs twice is written twice with the same
    value, because the score is computed from its logit. Grid (entries, any number of programs)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    flags = tl.load(row_ints + FLAGS)
    if (flags & (HAS_REPETITION + HAS_COUNTS)) == 0:
        return
    row_doubles = doubles_ptr + row.to(tl.int64) * (row_words // 2)
    repetition = tl.load(row_doubles + REPETITION).to(tl.float32)
    frequency = tl.load(row_doubles + FREQUENCY)
    presence = tl.load(row_doubles + PRESENCE)
    position = tl.load(positions_ptr + entry)
    prompt_length = tl.load(row_ints + PROMPT_LENGTH)
    # Only the repetition penalty applies to prompt tokens.
    first = tl.where((flags & HAS_REPETITION) != 0, 0, prompt_length)
    stride = tl.num_programs(1) * TILE
    for start in range(first + tl.program_id(1) * TILE, position, stride):
        places = start + tl.arange(0, TILE)
        inside = places < position
        tokens = tl.load(row_tokens_ptr + row.to(tl.int64) * row_tokens_stride + places, mask=inside, other=0)
        scores = tl.load(logits_ptr + entry.to(tl.int64) * logits_stride + tokens, mask=inside, other=0.0).to(
            tl.float32
        )
        if MASKED:
            line = tl.load(mask_lines_ptr + entry)
            scores = _masked(scores, tokens, inside, masks_ptr, mask_words, line)
        if (flags & HAS_REPETITION) != 0:
            divided = tl.div_rn(scores, tl.zeros_like(scores) + repetition)
            scores = tl.where(scores > 0.0, divided, scores * repetition)
        if (flags & HAS_COUNTS) != 0:
            counts = tl.load(counts_ptr + entry.to(tl.int64) * vocabulary + tokens, mask=inside, other=0)
            lowered = scores.to(tl.float64) - (frequency * counts.to(tl.float64) + presence)
            scores = tl.where(counts > 0, lowered.to(tl.float32), scores)
        tl.store(scores_ptr + entry.to(tl.int64) * vocabulary + tokens, scores, mask=inside)


@triton.jit
def lists_kernel(
    scores_ptr,
    rows_ptr,
    positions_ptr,
    words_ptr,
    doubles_ptr,
    kept_ends_ptr,
    vocabulary,
    row_words,
    ends_stride,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Applies logit_bias, then forbids the end tokens before min_tokens; one program per entry.

    If a grammar allows only end tokens, they stay allowed.
    """
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row_ints = words_ptr + row.to(tl.int64) * row_words
    if (tl.load(row_ints + FLAGS) & HAS_LISTS) == 0:
        return
    scores_line = scores_ptr + entry.to(tl.int64) * vocabulary
    num_biases = tl.load(row_ints + NUM_BIASES)
    values_ptr = doubles_ptr + row.to(tl.int64) * (row_words // 2) + HEADER // 2
    for start in range(0, num_biases, TILE):
        items = start + tl.arange(0, TILE)
        inside = items < num_biases
        tokens = tl.load(row_ints + HEADER + 2 * num_biases + items, mask=inside, other=0)
        biases = tl.load(values_ptr + items, mask=inside, other=0.0)
        scores = tl.load(scores_line + tokens, mask=inside, other=0.0)
        tl.store(scores_line + tokens, (scores.to(tl.float64) + biases).to(tl.float32), mask=inside)
    tl.debug_barrier()  # an end token may have a bias: the biases must be stored before end tokens are forbidden

    output_index = tl.load(positions_ptr + entry) - tl.load(row_ints + PROMPT_LENGTH)
    if output_index >= tl.load(row_ints + MIN_TOKENS):
        return
    num_ends = tl.load(row_ints + NUM_ENDS)
    ends_ptr = row_ints + HEADER + 3 * num_biases
    kept_line = kept_ends_ptr + entry.to(tl.int64) * ends_stride
    for start in range(0, num_ends, TILE):
        items = start + tl.arange(0, TILE)
        inside = items < num_ends
        tokens = tl.load(ends_ptr + items, mask=inside, other=0)
        tl.store(kept_line + items, tl.load(scores_line + tokens, mask=inside, other=0.0), mask=inside)
        tl.store(scores_line + tokens, tl.full((TILE,), float("-inf"), tl.float32), mask=inside)
    if tl.load(row_ints + HAS_GRAMMAR) != 0:
        tl.debug_barrier()
        best = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, vocabulary, TILE):
            token_ids = start + tl.arange(0, TILE)
            scores = tl.load(scores_line + token_ids, mask=token_ids < vocabulary, other=float("-inf"))
            best = tl.where(scores > best, scores, best)
        if tl.max(best, 0) == float("-inf"):
            for start in range(0, num_ends, TILE):
                items = start + tl.arange(0, TILE)
                inside = items < num_ends
                tokens = tl.load(ends_ptr + items, mask=inside, other=0)
                tl.store(
                    scores_line + tokens, tl.load(kept_line + items, mask=inside, other=0.0), mask=inside
                )


@triton.jit
def start_rows_kernel(staged_ptr, words_ptr, row_words, TILE: tl.constexpr):
    """Copies the parameters of new rows from the staging buffer of the host: [row, offset, length] for each, then the
    words."""
    start = tl.program_id(0)
    row = tl.load(staged_ptr + 3 * start)
    offset = tl.load(staged_ptr + 3 * start + 1)
    length = tl.load(staged_ptr + 3 * start + 2)
    for first in range(0, length, TILE):
        items = first + tl.arange(0, TILE)
        inside = items < length
        words = tl.load(staged_ptr + offset + items, mask=inside, other=0)
        tl.store(words_ptr + row.to(tl.int64) * row_words + items, words, mask=inside)
