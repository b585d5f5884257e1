"""The reference sampler: from logits to tokens, for all entries of a step that sample.

Order of the operations:
1. mask the tokens that the grammar forbids;
2. penalties, logit_bias, min_tokens;
3. unless greedy: temperature, top_k, top_p, min_p, typical_p, xtc;
4. the argmax of the scores plus the noise of `sampling.noise`; greedy: the argmax without noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from weft.backends.grammar import NO_MASKS, Masks
from weft.backends.step_arrays import Rows, SampledEntries
from weft.request import Failure, FailureKind, SamplingParams, TokenLogprobs
from weft.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, noise_bits, noise_keys, uniform

_NUCLEUS_CANDIDATES = 1024

# Mask byte -> what to add to the scores of its eight tokens: 0 or minus infinity. Adding is three times as fast as
# np.where.
_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)

NOT_A_NUMBER = Failure(FailureKind.STEP, "the model's output is not a number (NaN or infinite logits)")
FORBIDDEN = Failure(FailureKind.NO_ALLOWED_TOKEN, "every token is forbidden by the request's parameters")
OVERFLOW = Failure(
    FailureKind.STEP, "repetition_penalty is so far from 1 that a logit became infinite or NaN"
)


@dataclass(frozen=True)
class Sampled:
    """One token per entry. The token of an entry with an error is meaningless."""

    tokens: np.ndarray  # int64 [S]
    logprobs: list[TokenLogprobs | None] | None  # None if no entry requests logprobs
    errors: dict[int, Failure]  # by entry


def sample(
    logits: np.ndarray,
    entries: SampledEntries,
    rows: Rows,
    eos_token_ids: Collection[int],
    masks: Masks = NO_MASKS,
) -> Sampled:
    """Samples the tokens of one step. Does not change `logits` [S, vocabulary]."""
    errors = dict(masks.errors)
    best = logits.max(axis=1)  # NaN if the row has a NaN
    for entry in np.flatnonzero(~np.isfinite(best)).tolist():
        errors[entry] = NOT_A_NUMBER

    scores = logits
    adjusted = [entry for entry in np.flatnonzero(~entries.is_plain).tolist() if entry not in errors]
    if adjusted or len(masks.entries):
        scores = logits.copy()
        _apply(masks, scores)
        for entry in adjusted:
            _adjust(scores[entry], entry, entries, rows, eos_token_ids)
    tokens = scores.argmax(axis=1)
    chosen = scores[np.arange(len(tokens)), tokens]
    for entry in np.flatnonzero(~np.isfinite(chosen)).tolist():
        errors.setdefault(entry, FORBIDDEN if chosen[entry] == -np.inf else OVERFLOW)
    drawn = np.flatnonzero(entries.temperatures > 0.0)
    drawn = drawn[[int(entry) not in errors for entry in drawn]] if errors else drawn
    if len(drawn):
        tokens[drawn] = _draw(scores[drawn], drawn, entries, rows)

    return Sampled(tokens, _requested_logprobs(logits, tokens, entries.top_counts, errors), errors)


def score(logits: np.ndarray, tokens: np.ndarray, top_count: int) -> list[TokenLogprobs]:
    """The logprobs of `tokens` [N] under `logits` [N, vocabulary], before any sampling parameter is applied.

    With `top_count`, also the most likely tokens of each row; at a tie, those with the lowest ids.
    """
    best = logits.max(axis=1, keepdims=True).astype(np.float64)
    normaliser = best + np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
    chosen = logits[np.arange(len(tokens)), tokens] - normaliser[:, 0]
    if not top_count:
        return [TokenLogprobs(value) for value in chosen.tolist()]
    top_count = min(top_count, logits.shape[1])
    lowest = np.partition(logits, -top_count, axis=1)[:, -top_count]
    scored = []
    for row, value in enumerate(chosen.tolist()):
        candidates = np.flatnonzero(logits[row] >= lowest[row])
        values = logits[row, candidates]
        ranked = np.argsort(-values, kind="stable")[:top_count]
        logprobs = (values[ranked] - normaliser[row, 0]).tolist()
        scored.append(TokenLogprobs(value, tuple(zip(candidates[ranked].tolist(), logprobs, strict=True))))
    return scored


def _requested_logprobs(
    logits: np.ndarray, tokens: np.ndarray, top_counts: np.ndarray, errors: Mapping[int, Failure]
) -> list[TokenLogprobs | None] | None:
    if (top_counts < 0).all():
        return None
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    for top_count in np.unique(top_counts[top_counts >= 0]).tolist():
        entries = [e for e in np.flatnonzero(top_counts == top_count).tolist() if e not in errors]
        for entry, value in zip(entries, score(logits[entries], tokens[entries], top_count), strict=True):
            logprobs[entry] = value
    return logprobs


def _apply(masks: Masks, scores: np.ndarray) -> None:
    """Masks the tokens that the grammars forbid, in place."""
    for entry, bits in zip(masks.entries.tolist(), masks.bits, strict=True):
        # Row by row, so that the added values stay in the CPU cache.
        scores[entry] += _ADDED_BY_BYTE.take(bits, axis=0).reshape(-1)[: scores.shape[1]]


def _adjust(
    scores: np.ndarray, entry: int, entries: SampledEntries, rows: Rows, eos_token_ids: Collection[int]
) -> None:
    """Applies penalties, logit_bias and min_tokens to the logits of one entry, in place."""
    row, length = int(entries.rows[entry]), int(entries.positions[entry])
    params = rows.params[row]
    assert params is not None, "a row samples before it is started"
    _penalise(scores, params, rows.tokens[row, :length], int(rows.prompt_lengths[row]))
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64)
        assert ids.max() < len(scores), "the scheduler refuses a logit_bias past the vocabulary"
        scores[ids] += np.fromiter(params.logit_bias.values(), np.float64)
    if entries.output_indices[entry] < params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        forbidden = [token for token in ends if token < len(scores)]
        before = scores[forbidden]
        scores[forbidden] = -np.inf
        if params.grammar is not None and scores.max() == -np.inf:
            scores[forbidden] = before  # the grammar is complete and allows only end tokens


def _penalise(scores: np.ndarray, params: SamplingParams, tokens: np.ndarray, prompt_length: int) -> None:
    """repetition_penalty scales the logits of prompt and output tokens. frequency_penalty and presence_penalty subtract
    from the logits of output tokens."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        generated, counts = np.unique(tokens[prompt_length:], return_counts=True)
        scores[generated] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: np.ndarray, drawn: np.ndarray, entries: SampledEntries, rows: Rows) -> np.ndarray:
    """Samples a token for each entry in `drawn` by the highest sum of score and noise. `scores` has one row per
    entry."""
    # Scores relative to the best one: with a tiny temperature, only the scores of tokens that cannot win overflow.
    relative = (scores - scores.max(axis=1, keepdims=True)).astype(np.float64)
    with np.errstate(over="ignore"):
        relative /= entries.temperatures[drawn, None]
    keys = noise_keys(entries.seeds[drawn], entries.output_indices[drawn])
    for index in np.flatnonzero(~entries.is_plain[drawn]):
        params = rows.params[entries.rows[drawn[index]]]
        assert params is not None
        _filter(relative[index], params)
        _exclude_top_choices(relative[index], params, keys[index])
        relative[index] -= relative[index].max()  # typical-p or xtc may have removed the best token
    return np.array([_winner(row, key) for row, key in zip(relative, keys, strict=True)])


def _winner(relative: np.ndarray, key: np.uint64) -> int:
    """The token with the highest sum of score and noise; the lowest id at a tie. Scores are relative to the best.

    The result is exact, but the logarithms of the noise are computed only for tokens that can win. The best score is 0,
    so the sum of its token is only that token's noise: `floor`. To reach it, a token needs noise of at least `floor`
    minus its score. gumbel(u) >= x implies u <= exp(-x), so comparing u is enough.
    """
    token_ids = np.flatnonzero(relative >= GUMBEL_MIN - GUMBEL_MAX)
    scores = relative[token_ids]
    values = uniform(noise_bits(key, token_ids))
    floor = gumbel(values[scores.argmax()])
    can_win = values <= np.exp(scores - floor) * (1 + 1e-9)
    sums = scores[can_win] + gumbel(values[can_win])
    return int(token_ids[can_win][sums.argmax()])


def _filter(scores: np.ndarray, params: SamplingParams) -> None:
    """Applies top_k, top_p, min_p and typical_p in place: removed tokens get the score minus infinity.

    Each filter sees the tokens that the previous filter kept. It also keeps all tokens that tie with the least likely
    token that it keeps; for typical_p, with the least typical one.
    """
    if 0 < params.top_k < len(scores):
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    if params.top_p < 1.0:
        scores[scores < _nucleus_floor(scores, params.top_p)] = -np.inf
    if params.min_p > 0.0:
        scores[scores < math.log(params.min_p)] = -np.inf  # relative to the best, which is always kept
    if params.typical_p < 1.0:
        probabilities = _softmax(scores)
        logs = np.log(probabilities, where=probabilities > 0, out=np.full_like(probabilities, -np.inf))
        entropy = -(probabilities * np.where(probabilities > 0, logs, 0.0)).sum()
        surprise = np.abs(-logs - entropy)
        order = np.argsort(surprise, kind="stable")
        ranked = probabilities[order]
        kept = np.cumsum(ranked) - ranked < params.typical_p
        scores[surprise > surprise[order][kept][-1]] = -np.inf


def _exclude_top_choices(scores: np.ndarray, params: SamplingParams, key: np.uint64) -> None:
    """Applies xtc in place to the tokens that the other filters kept. `scores` are relative to the best of all tokens.

    xtc applies with a probability. The random number for it is the noise of token id -1, which no token has. So the
    decision too is a pure function of seed and output index. xtc removes the tokens whose probability is at least
    xtc_threshold, except the least likely of them and the tokens that tie with it.
    """
    if uniform(noise_bits(key, np.array([-1])))[0] >= params.xtc_probability:
        return
    floor = math.log(params.xtc_threshold) + math.log(np.exp(scores).sum())
    likely = scores[scores >= floor]
    scores[scores > likely.min(initial=np.inf)] = -np.inf


def _nucleus_floor(scores: np.ndarray, top_p: float) -> float:
    """The lowest score among the most likely tokens whose probabilities sum up to `top_p`."""
    # Removed tokens are left out: their probability is 0, and np.partition is slow for equal values.
    candidates = scores[scores > -np.inf]
    best = candidates.max()
    total = np.exp(candidates - best).sum()
    if len(candidates) > _NUCLEUS_CANDIDATES:
        likeliest = np.partition(candidates, -_NUCLEUS_CANDIDATES)[-_NUCLEUS_CANDIDATES:]
        if np.exp(likeliest - best).sum() >= top_p * total:
            candidates = likeliest  # nearly always enough tokens; sorting only these is ten times faster
    ranked = np.sort(candidates)[::-1]
    probabilities = np.exp(ranked - best) / total
    kept = np.cumsum(probabilities) - probabilities < top_p  # kept if the more likely tokens sum up to less
    return float(ranked[kept][-1])


def _softmax(scores: np.ndarray) -> np.ndarray:
    probabilities = np.exp(scores - scores.max())
    return probabilities / probabilities.sum()
