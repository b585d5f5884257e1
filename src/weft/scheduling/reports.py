"""Owns what the scheduler reports to the engine: outputs and results. Ends requests."""

from __future__ import annotations

from weft.clock import Clock
from weft.metrics import SchedulerStats
from weft.request import Failure, FailureKind, FinishReason, GenerationResult, RequestState, TokenOutput
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable

_END_STATES: dict[FailureKind | None, tuple[RequestState, FinishReason]] = {
    None: (RequestState.COMPLETED, FinishReason.STOP),
    **dict.fromkeys(FailureKind, (RequestState.FAILED, FinishReason.ERROR)),
    FailureKind.CANCELLED: (RequestState.CANCELLED, FinishReason.CANCELLED),
    FailureKind.DEADLINE: (RequestState.CANCELLED, FinishReason.CANCELLED),
}
"""Failure -> state and finish reason of a request that ends without a new token. The key None stands for a stop string
in the text."""


class Reports:
    """Ends sequences: frees their memory, and reports their results."""

    def __init__(self, sequence_table: SequenceTable, stats: SchedulerStats, clock: Clock) -> None:
        self.outputs: list[TokenOutput] = []
        """Outputs since the last `take`. The scheduler adds each new token."""
        self._results: list[GenerationResult] = []
        self._sequence_table = sequence_table
        self._stats = stats
        self._clock = clock

    @property
    def has_any(self) -> bool:
        return bool(self.outputs or self._results)

    def take(self) -> tuple[list[TokenOutput], list[GenerationResult]]:
        outputs, results = self.outputs, self._results
        self.outputs, self._results = [], []
        return outputs, results

    def end(self, sequence: Sequence | None, failure: Failure | None) -> bool:
        """Ends a request without a new token. `failure` is None if it ends at a stop string. Returns False if the request
        has ended already: its id may then belong to a new request."""
        if sequence is None or sequence.finish_reason is not None:
            return False
        self._sequence_table.remove(sequence)
        self._add_end(sequence, failure)
        return True

    def complete(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a request whose last token is in `outputs` already."""
        self._sequence_table.remove(sequence)
        sequence.state, sequence.finish_reason = RequestState.COMPLETED, reason
        self._add_result(sequence)

    def abandon(self, error: str) -> None:
        """Reports every request as failed, and frees nothing."""
        sequences = self._sequence_table.sequences
        for sequence in list(sequences.values()):
            self._add_end(sequence, Failure(FailureKind.ENGINE, error))
        sequences.clear()

    def _add_end(self, sequence: Sequence, failure: Failure | None) -> None:
        """Adds the final output of a request that ends without a new token, and its result."""
        sequence.failure = failure
        sequence.state, reason = _END_STATES[None if failure is None else failure.kind]
        sequence.finish_reason, length = reason, len(sequence.tokens)
        self.outputs.append(TokenOutput(sequence.request_id, None, "", None, True, reason, length))
        self._add_result(sequence)

    def _add_result(self, sequence: Sequence) -> None:
        table, now = self._sequence_table, self._clock()
        if sequence.preemptions and sequence.phase is Phase.WAITING:
            sequence.end_preemption(now)  # it ended while it was preempted
        sequence.enter(Phase.WAITING, now)
        if sequence.request.session_id is not None:
            session = (sequence.request.cache_salt, sequence.request.session_id)
            table.sessions.keep(session, sequence.block_hashes, now)
        if now < table.history.until:
            assert sequence.finish_reason is not None
            table.history.add_end(now, table.applied_step, sequence.request_id, sequence.finish_reason)
        self._stats.prompt_tokens_cached += sequence.cached_tokens or 0
        self._results.append(sequence.result())
