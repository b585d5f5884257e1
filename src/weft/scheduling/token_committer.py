"""Commits the tokens of a step that succeeded: to its sequences, to the outputs, and to the statistics of tokens."""

from __future__ import annotations

from itertools import islice, repeat, takewhile
from operator import eq

from weft.metrics import SchedulerStats
from weft.plan import BackendInfo, StepResult
from weft.request import FinishReason, RequestState, TokenLogprobs, TokenOutput
from weft.scheduling.draft_tokens import Speculation
from weft.scheduling.pending_plan import PendingPlan
from weft.scheduling.reports import Reports
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable


class TokenCommitter:
    """Owns the times of first tokens and the gaps between tokens, until the engine reads them."""

    def __init__(
        self,
        info: BackendInfo,
        sequence_table: SequenceTable,
        reports: Reports,
        speculation: Speculation,
        stats: SchedulerStats,
    ) -> None:
        self.token_gaps: dict[float, int] = {}
        """Inter-token latency -> how often it occurred. The engine reads and clears it."""
        self.first_token_times: list[float] = []
        """Seconds from arrival to the first token, of requests that got it. The engine reads and clears it."""
        self.keeps_logprobs = True
        """Whether results include logprobs. Outputs always do."""
        self._info = info
        self._sequence_table = sequence_table
        self._reports = reports
        self._speculation = speculation
        self._stats = stats

    def commit(self, pending: PendingPlan, result: StepResult, now: float) -> None:
        """Commits one step. Steps must be committed in plan order."""
        outputs = self._reports.outputs
        num_reported = len(outputs)
        self._take_prompt_logprobs(pending, result)
        for sequence in pending.sequences if result.vectors else ():
            sequence.vector = result.vectors.get(sequence.request_id)
        self._commit_decodes(pending, result, now)
        self._commit_drafts(pending, result, now)
        self._commit_prefills(pending, result, now)
        for sequence in pending.sequences if result.forced else ():
            forced = result.forced.get(sequence.request_id)
            if forced is not None and sequence.draft_proposer is not None:
                sequence.draft_proposer.force(forced)
        self._stats.tokens_generated += len(outputs) - num_reported

    def _commit_decodes(self, pending: PendingPlan, result: StepResult, now: float) -> None:
        """The hottest loop of the scheduler. It handles the common case inline and calls `_take_token` for the rest.
        Neighbouring entries mostly had their last token at the same time, so equal gaps are counted in one call."""
        plan, block_size = pending.plan, self._info.block_size
        decoding, outputs, new = Phase.DECODE, self._reports.outputs, tuple.__new__
        logprobs = result.logprobs if result.logprobs is not None else repeat(None)
        last_token_at, num_equal_gaps = now, 0
        entries = zip(pending.sequences, plan.starts, result.tokens, logprobs, strict=False)
        for sequence, start, token, logprob in islice(entries, plan.num_decodes):
            tokens = sequence.tokens
            length = len(tokens) + 1
            is_common_case = sequence.phase is decoding and length < sequence.limit
            if not is_common_case or token in sequence.stop_ids:
                self._commit(sequence, plan.step, start + 1)
                self._take_token(sequence, token, logprob, now)
                sequence.update_proposer()
                continue
            tokens.append(token)
            sequence.computed = computed = start + 1
            if sequence.last_token_at != last_token_at:
                self._count_gaps(now - last_token_at, num_equal_gaps)
                last_token_at, num_equal_gaps = sequence.last_token_at, 0
            num_equal_gaps += 1
            sequence.last_token_at = now
            value: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if logprob is not None:
                if self.keeps_logprobs:
                    sequence.logprobs.append(logprob)
                value, top = logprob
            if computed % block_size == 0:
                self._sequence_table.prefixes.register_generated(sequence)
            if sequence.draft_proposer is not None:
                sequence.draft_proposer.update()
            outputs.append(
                new(TokenOutput, (sequence.request_id, token, "", value, False, None, length, top))
            )
        self._count_gaps(now - last_token_at, num_equal_gaps)

    def _commit_drafts(self, pending: PendingPlan, result: StepResult, now: float) -> None:
        """Commits the accepted draft tokens, and the token sampled after them. The other draft tokens count as not
        computed."""
        plan, sampled = pending.plan, pending.plan.num_decodes
        for entry, drafts in enumerate(plan.drafts, plan.num_decodes):
            sequence, start = pending.sequences[entry], plan.starts[entry]
            tokens = result.tokens[sampled : sampled + 1 + len(drafts)]
            num_accepted = sum(takewhile(bool, map(eq, drafts, tokens)))
            gap = (now - sequence.last_token_at) / (1 + num_accepted)
            assert sequence.draft_proposer is not None
            sequence.draft_proposer.count_checked(len(drafts), num_accepted)
            is_learned = sequence.draft_proposer.is_learned
            num_forced = sequence.draft_proposer.num_forced
            index = 0
            for index, token in enumerate(tokens[: 1 + num_accepted]):
                self._commit(sequence, plan.step, start + index + 1)
                logprob = None if result.logprobs is None else result.logprobs[sampled + index]
                self._take_token(sequence, token, logprob, now, gap)
                if sequence.finish_reason is not None:
                    break
            else:
                sequence.scheduled, sequence.target = sequence.computed, len(sequence.tokens)
                sequence.update_proposer()
            self._stats.tokens_drafted += len(drafts)
            self._stats.drafts_accepted += index
            if is_learned and len(drafts) > num_forced:
                num_learned, num_right = len(drafts) - num_forced, max(0, index - num_forced)
                self._stats.learned_drafts += num_learned
                self._stats.learned_drafts_accepted += num_right
                self._stats.learned_seconds_saved += self._speculation.seconds_saved(
                    num_learned, num_right, len(plan.rows)
                )
            sampled += 1 + len(drafts)

    def _commit_prefills(self, pending: PendingPlan, result: StepResult, now: float) -> None:
        plan = pending.plan
        sampled = plan.first_prefill + sum(map(len, plan.drafts))
        is_recorded = now < self._sequence_table.history.until
        for entry in range(plan.first_prefill, len(plan.rows)):
            sequence = pending.sequences[entry]
            if is_recorded and sequence.admitted_step <= plan.step and sequence.finish_reason is None:
                start, count = plan.starts[entry], plan.counts[entry]
                self._sequence_table.history.events.append(
                    (now, plan.step, "chunk", sequence.request_id, start, count)
                )
            self._commit(sequence, plan.step, plan.starts[entry] + plan.counts[entry])
            if plan.samples[entry]:
                logprob = None if result.logprobs is None else result.logprobs[sampled]
                self._take_token(sequence, result.tokens[sampled], logprob, now)
                sequence.update_proposer()
                sampled += 1

    def _commit(self, sequence: Sequence, step: int, end: int) -> None:
        """Marks positions before `end` as computed, unless the sequence was preempted after the step was planned."""
        if sequence.admitted_step <= step:
            sequence.computed = end

    def _take_prompt_logprobs(self, pending: PendingPlan, result: StepResult) -> None:
        for sequence in pending.sequences if result.prompt_logprobs else ():
            first, logprobs = result.prompt_logprobs.get(sequence.request_id, (0, ()))
            sequence.prompt_logprobs.update(enumerate(logprobs, first))

    def _take_token(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprobs | None,
        now: float,
        gap: float | None = None,
    ) -> None:
        """Appends and reports a sampled token, and ends the request if it is the last one.

        `gap`: the time since the previous token. If one step gave several tokens, the time is divided among them.
        """
        if sequence.finish_reason is not None:
            return  # it ended while the step was in flight: discard the token
        sequence.tokens.append(token)
        length = len(sequence.tokens)
        if logprob is not None and self.keeps_logprobs:
            sequence.logprobs.append(logprob)
        if sequence.first_token_at is not None:
            self._count_gaps(now - sequence.last_token_at if gap is None else gap, 1)
        else:
            sequence.first_token_at = now
            self.first_token_times.append(now - sequence.arrival)
            if now < self._sequence_table.history.until:
                self._sequence_table.history.events.append(
                    (now, self._sequence_table.applied_step, "first_token", sequence.request_id, 0, 0)
                )
            target = sequence.request.ttft_target
            self._stats.ttft_targets_missed += target is not None and now - sequence.arrival > target
        sequence.last_token_at = now
        if sequence.phase is Phase.PREFILL:
            sequence.enter(Phase.DECODE, now)
        computed = sequence.computed
        if computed and computed % self._info.block_size == 0 and sequence.state is RequestState.RUNNING:
            self._sequence_table.prefixes.register_generated(sequence)
        reason = None
        params = sequence.request.params
        is_eos = token in self._info.eos_token_ids and not params.ignore_eos
        # Before min_tokens the sampler forbids EOS, unless the grammar allows nothing else. Such an EOS ends the answer too.
        is_forced = is_eos and params.grammar is not None
        if token in sequence.stop_ids and (length >= sequence.min_length or is_forced):
            reason = FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
        elif length >= sequence.limit:
            reason = FinishReason.LENGTH
        value, top = logprob if logprob is not None else (None, ())
        self._reports.outputs.append(
            TokenOutput(sequence.request_id, token, "", value, reason is not None, reason, length, top)
        )
        if reason is not None:
            self._reports.complete(sequence, reason)
            self._speculation.keep(sequence)

    def _count_gaps(self, gap: float, times: int) -> None:
        if times:
            self.token_gaps[gap] = self.token_gaps.get(gap, 0) + times
