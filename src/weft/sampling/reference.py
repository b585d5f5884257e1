"""From logits to tokens, for all sampling entries of a step at once.

Order: what grammars forbid; penalties, bias and the tokens that min_tokens forbids; then, unless greedy, temperature, top-k, top-p, min-p, typical-p; then
the argmax of what is left plus the noise of `backends.noise`. Greedy is the argmax without noise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from weft.backends.grammar import NO_MASKS, Masks
from weft.backends.step_arrays import Rows, SampledEntries
from weft.request import SamplingParams, TokenLogprobs
from weft.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, noise_bits, noise_keys, uniform

_NUCLEUS_GUESS = 1024

# What each byte of a mask adds to the scores of its eight tokens: adding is a third of the work of choosing.
_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)

NOT_A_NUMBER = "the model's output is not a number (NaN or infinite logits)"
FORBIDDEN = "every token is forbidden by the request's parameters"
OVERFLOW = "repetition_penalty is so far from 1 that a logit became infinite or no number"


@dataclass(frozen=True)
class Sampled:
    """One token per entry; an entry with an error has a token without meaning."""

    tokens: np.ndarray  # int64 [S]
    logprobs: list[TokenLogprobs | None] | None  # None for all where nobody asked
    errors: dict[int, str]  # entry -> why it has no token


def sample(
    logits: np.ndarray,
    entries: SampledEntries,
    rows: Rows,
    eos_token_ids: Collection[int],
    masks: Masks = NO_MASKS,
) -> Sampled:
    """The tokens of one step; `logits` [S, vocabulary] is left as it is."""
    errors = dict(masks.errors)
    best = logits.max(axis=1)  # NaN where a row has one
    for entry in np.flatnonzero(~np.isfinite(best)).tolist():
        errors[entry] = NOT_A_NUMBER

    scores = logits
    shaped = [entry for entry in np.flatnonzero(~entries.is_plain).tolist() if entry not in errors]
    if shaped or len(masks.entries):
        scores = logits.copy()
        _apply(masks, scores)
        for entry in shaped:
            _shape(scores[entry], entry, entries, rows, eos_token_ids)
    tokens = scores.argmax(axis=1)
    chosen = scores[np.arange(len(tokens)), tokens]
    for entry in np.flatnonzero(~np.isfinite(chosen)).tolist():
        errors.setdefault(entry, FORBIDDEN if chosen[entry] == -np.inf else OVERFLOW)
    drawn = np.flatnonzero(entries.temperatures > 0.0)
    drawn = drawn[[int(entry) not in errors for entry in drawn]] if errors else drawn
    if len(drawn):
        tokens[drawn] = _draw(scores[drawn], drawn, entries, rows)

    return Sampled(tokens, _wanted_logprobs(logits, tokens, entries.top_counts, errors), errors)


def score(logits: np.ndarray, tokens: np.ndarray, top_count: int) -> list[TokenLogprobs]:
    """How likely each of `tokens` [N] is by its row of `logits` [N, vocabulary], under the model's own distribution:
    before any of the parameters. Beside it the likeliest ones; of equals those with the lowest ids."""
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


def _wanted_logprobs(
    logits: np.ndarray, tokens: np.ndarray, top_counts: np.ndarray, errors: Mapping[int, str]
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
    """Forbid what the grammars do not allow, for all entries that have one, in place."""
    for entry, bits in zip(masks.entries.tolist(), masks.bits, strict=True):
        # Row by row: what is added stays in the processor's cache.
        scores[entry] += _ADDED_BY_BYTE.take(bits, axis=0).reshape(-1)[: scores.shape[1]]


def _shape(
    scores: np.ndarray, entry: int, entries: SampledEntries, rows: Rows, eos_token_ids: Collection[int]
) -> None:
    """Apply what changes the logits of one entry, in place."""
    row, length = int(entries.rows[entry]), int(entries.positions[entry])
    params = rows.params[row]
    assert params is not None, "a row samples before it was started"
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
            scores[forbidden] = before  # the grammar is complete: there is nothing to go on with


def _penalise(scores: np.ndarray, params: SamplingParams, tokens: np.ndarray, prompt_length: int) -> None:
    """Repetition looks at prompt and output and scales; frequency and presence look at the output and subtract."""
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
    """A token for each of the entries `drawn`, whose scores these are, by the highest sum of score and noise."""
    # Relative to the best, so that even the smallest temperature divides without overflow in what can win.
    relative = (scores - scores.max(axis=1, keepdims=True)).astype(np.float64)
    with np.errstate(over="ignore"):
        relative /= entries.temperatures[drawn, None]
    for index in np.flatnonzero(~entries.is_plain[drawn]):
        params = rows.params[entries.rows[drawn[index]]]
        assert params is not None
        _filter(relative[index], params)
        relative[index] -= relative[index].max()  # typical-p may have removed the best
    keys = noise_keys(entries.seeds[drawn], entries.output_indices[drawn])
    return np.array([_winner(row, key) for row, key in zip(relative, keys, strict=True)])


def _winner(relative: np.ndarray, key: np.uint64) -> int:
    """The token with the highest sum of score and noise, the lowest id at a tie; scores are relative to the best.

    Exact, but noise in full is made only for the few that can win: a token needs noise of at least `floor` less its
    score, and gumbel(u) >= x holds only where u <= exp(-x).
    """
    token_ids = np.flatnonzero(relative >= GUMBEL_MIN - GUMBEL_MAX)
    scores = relative[token_ids]
    values = uniform(noise_bits(key, token_ids))
    floor = gumbel(values[scores.argmax()])
    can_win = values <= np.exp(scores - floor) * (1 + 1e-9)
    sums = scores[can_win] + gumbel(values[can_win])
    return int(token_ids[can_win][sums.argmax()])


def _filter(scores: np.ndarray, params: SamplingParams) -> None:
    """Remove unlikely tokens (score minus infinity), in place. Each filter sees what the one before it left, and
    keeps all tokens that tie with the last one it keeps."""
    if 0 < params.top_k < len(scores):
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    if params.top_p < 1.0:
        scores[scores < _nucleus_floor(scores, params.top_p)] = -np.inf
    if params.min_p > 0.0:
        scores[scores < np.log(params.min_p)] = -np.inf  # scores are relative to the best, which never goes
    if params.typical_p < 1.0:
        chances = _softmax(scores)
        logs = np.log(chances, where=chances > 0, out=np.full_like(chances, -np.inf))
        entropy = -(chances * np.where(chances > 0, logs, 0.0)).sum()
        surprise = np.abs(-logs - entropy)
        order = np.argsort(surprise, kind="stable")
        ranked = chances[order]
        kept = np.cumsum(ranked) - ranked < params.typical_p
        scores[surprise > surprise[order][kept][-1]] = -np.inf


def _nucleus_floor(scores: np.ndarray, top_p: float) -> float:
    """The lowest score among the likeliest tokens that together have a probability of `top_p`."""
    candidates = scores[
        scores > -np.inf
    ]  # the others have no probability, and selection is slow among equals
    best = candidates.max()
    total = np.exp(candidates - best).sum()
    if len(candidates) > _NUCLEUS_GUESS:
        likeliest = np.partition(candidates, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS:]
        if np.exp(likeliest - best).sum() >= top_p * total:
            candidates = likeliest  # nearly always: sorting these alone is ten times faster
    ranked = np.sort(candidates)[::-1]
    chances = np.exp(ranked - best) / total
    kept = np.cumsum(chances) - chances < top_p  # what stands before a token is not enough yet
    return float(ranked[kept][-1])


def _softmax(scores: np.ndarray) -> np.ndarray:
    chances = np.exp(scores - scores.max())
    return chances / chances.sum()
