"""Calls the C++ sampler, once per step. The sampler gives the same tokens as `weft.sampling.reference`, from the same
logits."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from weft._kernels import Pool, Sampler
from weft.backends.grammar import NO_MASKS, Masks
from weft.backends.step_arrays import Rows, SampledEntries
from weft.request import SamplingParams, TokenLogprobs
from weft.sampling.reference import FORBIDDEN, NOT_A_NUMBER, OVERFLOW, Sampled
from weft.sampling.words import sampler_words

# The keys are the numbers of enum Verdict in csrc/kernels/sampler.h.
_REASONS = {
    1: NOT_A_NUMBER,
    2: FORBIDDEN,
    3: OVERFLOW,
}


class NativeSampler:
    """Has the functions `sample` and `score` of the numpy sampler, on a thread pool. Only one thread may call it."""

    def __init__(self, pool: Pool) -> None:
        self._kernel = Sampler(pool)
        self._kernel_params: dict[int, SamplingParams] = {}
        """Row -> its parameters, as they were last passed to the kernel."""
        self._eos_token_ids: Collection[int] = ()
        self._no_logprobs = _LogprobArrays(0, 0)

    def sample(
        self,
        logits: np.ndarray,
        entries: SampledEntries,
        rows: Rows,
        eos_token_ids: Collection[int],
        masks: Masks = NO_MASKS,
    ) -> Sampled:
        """Samples the tokens of one step. Does not change `logits` [S, vocabulary] float32."""
        count, vocabulary = logits.shape
        if rows.not_plain and not entries.is_plain.all():
            self._set_rows(entries, rows, eos_token_ids)
        top_counts, arrays = entries.top_counts, self._no_logprobs
        widest = int(top_counts.max(initial=-1)) if rows.with_logprobs else -1
        if widest >= 0:
            top_counts = np.minimum(top_counts, vocabulary)
            arrays = _LogprobArrays(count, min(widest, vocabulary))
        tokens, verdicts = np.empty(count, np.int64), np.empty(count, np.uint8)
        self._kernel.sample(
            logits,
            entries.rows,
            entries.positions,
            entries.output_indices,
            entries.seeds,
            entries.temperatures,
            entries.is_plain,
            rows.tokens,
            rows.prompt_lengths,
            masks.entries,
            masks.bits,
            top_counts,
            tokens,
            verdicts,
            arrays.logprobs,
            arrays.top_tokens,
            arrays.top_logprobs,
        )
        errors = dict(masks.errors)
        if any(verdicts.tobytes()):  # for so few bytes ten times faster than numpy's `any`
            for entry in np.flatnonzero(verdicts).tolist():
                reason = _REASONS[int(verdicts[entry])]
                if reason is NOT_A_NUMBER:
                    errors[entry] = reason
                else:
                    errors.setdefault(entry, reason)
        if widest < 0:
            return Sampled(tokens, None, errors)
        logprobs = [
            arrays.read(entry, top_count) if top_count >= 0 and entry not in errors else None
            for entry, top_count in enumerate(top_counts.tolist())
        ]
        return Sampled(tokens, logprobs, errors)

    def score(self, logits: np.ndarray, tokens: np.ndarray, top_count: int) -> list[TokenLogprobs]:
        """The logprobs of `tokens` [N] by `logits` [N, vocabulary], like `score` of the numpy sampler."""
        count, vocabulary = logits.shape
        top_count = min(top_count, vocabulary)
        arrays = _LogprobArrays(count, top_count)
        self._kernel.score(logits, tokens, top_count, arrays.logprobs, arrays.top_tokens, arrays.top_logprobs)
        return [arrays.read(entry, top_count) for entry in range(count)]

    def _set_rows(self, entries: SampledEntries, rows: Rows, eos_token_ids: Collection[int]) -> None:
        """Passes the parameters of rows to the kernel, if they changed. Parameters are frozen, so comparing identities
        is enough."""
        if eos_token_ids != self._eos_token_ids:
            self._eos_token_ids = eos_token_ids
            self._kernel_params.clear()
        for row in entries.rows[~entries.is_plain].tolist():
            params = rows.params[row]
            assert params is not None, "a row samples before it was started"
            if self._kernel_params.get(row) is not params:
                self._set_row(row, params)
                self._kernel_params[row] = params

    def _set_row(self, row: int, params: SamplingParams) -> None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        self._kernel.set_row(
            row,
            sampler_words(params),
            list(params.logit_bias),
            list(params.logit_bias.values()),
            params.min_tokens,
            sorted(ends),
            params.grammar is not None,
        )


class _LogprobArrays:
    """Buffers into which the kernel writes logprobs: for each entry its token, and up to `width` top tokens."""

    def __init__(self, count: int, width: int) -> None:
        self.logprobs = np.empty(count, np.float64)
        self.top_tokens = np.empty((count, width), np.int64)
        self.top_logprobs = np.empty((count, width), np.float64)

    def read(self, entry: int, top_count: int) -> TokenLogprobs:
        tokens = self.top_tokens[entry, :top_count].tolist()
        values = self.top_logprobs[entry, :top_count].tolist()
        return TokenLogprobs(float(self.logprobs[entry]), tuple(zip(tokens, values, strict=True)))
