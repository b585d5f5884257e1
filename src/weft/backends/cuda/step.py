"""The handle of a step on the GPU: waits for the step and makes its result."""

from __future__ import annotations

import math
from itertools import compress

import numpy as np

from weft.backends.cuda.mailbox import MailboxSlot
from weft.backends.cuda.prompt_logprobs import ScoredChunk
from weft.backends.cuda.sampler import DeviceSampler, PendingLogprobs
from weft.backends.cuda.swap import GpuSwap
from weft.backends.grammar import NO_MASKS, Masks, RowGrammars
from weft.plan import IterationPlan, StepResult
from weft.request import Failure, RequestId, TokenLogprobs
from weft.sampling.reference import NOT_A_NUMBER


class DeviceStep:
    """The handle of a step. The GPU writes its result into `slot`. `collect` reads it once: when `result` is called, or
    before the slot is used again."""

    __slots__ = (
        "_grammars",
        "_plan",
        "_result",
        "_sampler",
        "_slot",
        "_swaps",
        "logprobs",
        "masks",
        "sampled_rows",
        "scored_chunks",
    )

    def __init__(
        self,
        plan: IterationPlan,
        slot: MailboxSlot,
        sampler: DeviceSampler,
        swaps: GpuSwap,
        grammars: RowGrammars,
    ) -> None:
        self._plan = plan
        self._slot = slot
        self._sampler = sampler
        self._swaps = swaps
        self._grammars = grammars
        samples_all = plan.num_decodes == len(plan.rows)
        self.sampled_rows: tuple[int, ...] = (
            plan.rows if samples_all else tuple(compress(plan.rows, plan.samples))
        )
        self.masks: Masks = NO_MASKS
        self.logprobs: PendingLogprobs | None = None
        self.scored_chunks: list[ScoredChunk] = []
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        try:
            self.collect()
            assert self._result is not None
            finished, failed = self._swaps.take_reports(must_wait=not self._plan.rows)
        except Exception:
            self._swaps.abandon()
            raise
        result = self._result
        if not finished and not failed:
            return result
        return StepResult(
            result.tokens,
            result.logprobs,
            result.prompt_logprobs,
            result.errors,
            result.error,
            finished_swaps=finished,
            failed_swaps=failed,
        )

    def fail(self, error: str) -> None:
        """Sets the result of a step whose launch failed. `collect` then does not wait for the GPU."""
        self._result = StepResult(error=error)

    def collect(self) -> None:
        """Waits for the end of the step, and reads the slot."""
        if self._result is not None:
            return
        self._slot.event.synchronize()
        self._slot.step = None
        count = len(self.sampled_rows)
        tokens, codes = self._slot.outbox[0, :count], self._slot.outbox[1, :count]
        errors = self._errors(codes) if codes.any() or self.masks.errors or self._sampler.refused else {}
        if self._grammars.has_any:
            self._grammars.advance(np.array(self.sampled_rows, np.int64), tokens)
        logprobs = None if self.logprobs is None else self.logprobs.read(errors)
        scores, request_errors = self._scores()
        if errors:
            request_ids = list(compress(self._plan.request_ids, self._plan.samples))
            request_errors.update({request_ids[entry]: error for entry, error in errors.items()})
        self._result = StepResult(tokens.tolist(), logprobs, scores, request_errors)

    def _errors(self, codes: np.ndarray) -> dict[int, Failure]:
        """Index in `sampled_rows` -> why this row got no token."""
        errors = {entry: self._sampler.failure(int(codes[entry])) for entry in np.flatnonzero(codes).tolist()}
        errors.update(self.masks.errors)
        refused = self._sampler.refused
        if refused:
            errors.update(
                {entry: refused[row] for entry, row in enumerate(self.sampled_rows) if row in refused}
            )
        return errors

    def _scores(self) -> tuple[dict[RequestId, tuple[int, list[TokenLogprobs]]], dict[RequestId, Failure]]:
        """Logprobs of prompts, and an error for each request with a logprob that is not finite."""
        scores: dict[RequestId, tuple[int, list[TokenLogprobs]]] = {}
        errors: dict[RequestId, Failure] = {}
        for chunk in self.scored_chunks:
            logprobs = (value for pending in chunk.scores for value in pending.read())
            values = [value for value in logprobs if value is not None]
            if not all(math.isfinite(value.logprob) for value in values):
                errors[chunk.request_id] = NOT_A_NUMBER
            scores[chunk.request_id] = (chunk.first, values)
        return scores, errors
