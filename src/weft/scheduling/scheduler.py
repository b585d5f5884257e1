"""The scheduler: takes requests in, plans step after step over them, and applies what came back.

One iteration: `schedule()` makes a plan, the backend runs it, `apply()` commits it (or `fail()` rolls it back).
Planning ahead is allowed: `schedule()` may be called again before the last plan was applied.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise, repeat, takewhile
from operator import eq

from weft.clock import Clock
from weft.config import PriorityPolicy, SchedulerConfig
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    TokenLogprobs,
    TokenOutput,
)
from weft.scheduling.budget import TokenBudget
from weft.scheduling.cache.block_pool import BlockKey
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.checks import check_request
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.planner import Planner
from weft.scheduling.policy import AdmissionPolicy, StepCostModel
from weft.scheduling.queue import RequestQueue
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable
from weft.scheduling.stats import SchedulerStats
from weft.tiers import longest_sequence


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """A plan that was submitted and not applied yet, with the sequences of its entries."""

    plan: IterationPlan
    sequences: list[Sequence]
    registered: list[tuple[int, BlockKey]]
    is_retry: bool


class ContinuousBatchScheduler:
    """The brain. Not thread-safe: one owner calls it. Deterministic: same calls and clock, same plans."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, clock: Clock) -> None:
        self.config = config
        self.info = info
        self.stats = SchedulerStats()
        self.cost_model = StepCostModel()
        self.max_sequence_length = longest_sequence(info)
        self.token_gaps: dict[float, int] = {}
        """Seconds between a sequence's tokens -> how often, since the engine last took them."""
        self._clock = clock
        policy = AdmissionPolicy(config)
        self._roster = SequenceTable(config, info, policy)
        self._planner = Planner(config, info, self._roster, policy, self.cost_model, clock)
        self._in_flight: deque[PendingPlan] = deque()
        self._retries: deque[list[Sequence]] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._outputs: list[TokenOutput] = []
        self._results: list[GenerationResult] = []
        self._untold_tables: list[tuple[Sequence, int, int]] = []
        """Block-table entries made by planning that led to no plan."""
        self.keeps_logprobs = True
        """Whether results have the logprobs of their tokens. Outputs have them in any case."""
        self._is_worth_waiting = False
        """Whether guesses about sequences in flight are worth more than planning ahead."""
        self._next_order = 0
        self._next_step = 0

    @property
    def kv_cache(self) -> KvCacheManager:
        return self._roster.kv_cache

    @property
    def queue(self) -> RequestQueue:
        return self._roster.queue

    @property
    def running(self) -> list[Sequence]:
        return self._roster.running

    @property
    def sequences(self) -> dict[RequestId, Sequence]:
        """All requests that are not over."""
        return self._roster.sequences

    @property
    def resuming(self) -> list[Sequence]:
        """Preempted requests whose swap-in is under way."""
        return list(self._roster.resuming.values())

    @property
    def has_work(self) -> bool:
        return bool(self._roster.sequences or self._in_flight)

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs or self._results)

    @property
    def may_plan_ahead(self) -> bool:
        """Not while a failed step is tried again, nor behind a step with drafts, nor where one should be next."""
        if self._is_worth_waiting or self.is_retrying:
            return False
        return not self._in_flight or not self._in_flight[-1].plan.drafts

    @property
    def is_retrying(self) -> bool:
        """Whether a failed step is tried again in halves: each half must be seen to succeed on its own."""
        return bool(self._retries) or (bool(self._in_flight) and self._in_flight[-1].is_retry)

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequestError for what can never run, saying both numbers. Any thread may call it."""
        check_request(request, self.info.vocabulary_size, self._longest(request), self.config)

    def prepare(self, sequence: Sequence) -> None:
        """Checks it and computes its block keys: the long part of taking a long prompt in. It touches nothing but the
        sequence: any thread may call it."""
        request = sequence.request
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n is {request.params.n}; allowed here: 1. `submit_choices` takes requests for several answers",
                field="n",
            )
        self.check(request)
        sequence.limit = min(sequence.limit, self._longest(request))
        if not request.params.ignore_eos:
            sequence.stop_ids |= self.info.eos_token_ids
        sequence.sits_out = request.params.grammar is not None and not self.info.grammars_may_overlap
        self._roster.prefixes.extend_keys(sequence)
        self._planner.speculation.begin(sequence)
        sequence.is_prepared = True

    def _longest(self, request: InferenceRequest) -> int:
        """Tokens that the request's sequence may grow to."""
        wanted = request.max_sequence_length
        return self.max_sequence_length if wanted is None else min(self.max_sequence_length, wanted)

    def add(self, *sequences: Sequence) -> None:
        """Takes new requests in, all of them, or raises InvalidRequestError or QueueFullError and changes nothing."""
        for sequence in sequences:
            if not sequence.is_prepared:
                self.prepare(sequence)
            if sequence.request_id in self.sequences:
                raise InvalidRequestError(f"request_id {sequence.request_id} is in use", field="request_id")
        self.queue.check_room(sum(s.prompt_length for s in sequences), len(sequences))
        now = self._clock()
        for sequence in sequences:
            sequence.order = self._next_order
            self._next_order += 1
            sequence.arrival = sequence.since = now
            if sequence.request.deadline is not None:
                sequence.deadline_at = now + sequence.request.deadline
                heapq.heappush(self._deadlines, (sequence.deadline_at, sequence.order, sequence))
            self.sequences[sequence.request_id] = sequence
            self.queue.push(sequence)
            self.stats.prompt_tokens += sequence.prompt_length

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        """Ends a request in whatever state it is. False: it is over already, or never was."""
        return self._end_early(request_id, RequestState.CANCELLED, FinishReason.CANCELLED, reason)

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        """Ends a request as complete after its first `num_tokens` new tokens: a stop was found in its text.
        False: it is over already."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        del sequence.tokens[sequence.prompt_length + num_tokens :]
        del sequence.logprobs[num_tokens:]
        return self._end_early(request_id, RequestState.COMPLETED, FinishReason.STOP, None)

    def fail_request(self, request_id: RequestId, error: str) -> bool:
        """Ends one request in error, for a cause outside the step. False: it is over already."""
        return self._end_early(request_id, RequestState.FAILED, FinishReason.ERROR, error)

    def abandon(self, error: str) -> None:
        """Tells every request that it failed and gives nothing back: for when the state itself is broken."""
        for sequence in list(self.sequences.values()):
            sequence.state, sequence.finish_reason = RequestState.FAILED, FinishReason.ERROR
            self._tell_end(sequence, error)
        self.sequences.clear()

    def take_outputs(self) -> tuple[list[TokenOutput], list[GenerationResult]]:
        """What happened since the last call: tokens and ends in order, and the results of those that ended."""
        outputs, results = self._outputs, self._results
        self._outputs, self._results = [], []
        return outputs, results

    def _end_early(
        self, request_id: RequestId, state: RequestState, reason: FinishReason, error: str | None
    ) -> bool:
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        self._roster.remove(sequence)
        sequence.state, sequence.finish_reason = state, reason
        self._tell_end(sequence, error)
        return True

    def _complete(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a request whose last token has just been told."""
        self._roster.remove(sequence)
        sequence.state, sequence.finish_reason = RequestState.COMPLETED, reason
        self._book_result(sequence)

    def _tell_end(self, sequence: Sequence, error: str | None) -> None:
        """The final output of a request that ends without a token, and its result."""
        sequence.error = error
        reason, length = sequence.finish_reason, len(sequence.tokens)
        self._outputs.append(TokenOutput(sequence.request_id, None, "", None, True, reason, length))
        self._book_result(sequence)

    def _book_result(self, sequence: Sequence) -> None:
        now = self._clock()
        sequence.enter(Phase.WAITING, now)
        if sequence.request.session_id is not None:
            session = (sequence.request.cache_salt, sequence.request.session_id)
            self._roster.sessions.keep(session, sequence.keys, now)
        self.stats.prompt_tokens_cached += sequence.cached_tokens or 0
        self._results.append(sequence.result())

    def _expire(self) -> None:
        """Ends what is past its deadline, wherever it is, and lets go of sessions that are over."""
        deadlines, sessions = self._deadlines, self._roster.sessions
        if not deadlines and not sessions:
            return
        now = self._clock()
        sessions.expire(now)
        while deadlines and deadlines[0][0] <= now:
            sequence = heapq.heappop(deadlines)[2]
            waited = now - sequence.arrival
            message = f"deadline of {sequence.request.deadline:g} s passed after {waited:.3f} s"
            self._end_early(sequence.request_id, RequestState.CANCELLED, FinishReason.CANCELLED, message)
        if len(deadlines) > 64 and len(deadlines) > 4 * len(self.sequences):
            self._deadlines = [entry for entry in deadlines if entry[2].finish_reason is None]
            heapq.heapify(self._deadlines)

    # ------------------------------------------------------------------ planning

    def schedule(self) -> IterationPlan | None:
        """Plans one step over everything that waits and runs. None: there is nothing to do just now."""
        assert not (self._in_flight and self._in_flight[-1].plan.drafts), "it gets nobody knows how far"
        self._expire()
        config, roster = self.config, self._roster
        budget = TokenBudget(config.max_tokens_per_step, config.max_prefill_tokens, config.sequences_per_step)
        draft = PlanBuilder(self._next_step, budget, self._untold_tables)
        is_retry = self._plan_retry(draft)
        if not is_retry:
            self._planner.plan(draft)
        self.stats.preemptions_by_swap += len(draft.swap_out)
        self.stats.preemptions_by_recompute += len(draft.preempted) - len(draft.swap_out)
        if draft.is_empty and (self._in_flight or not roster.resuming):
            # NOTE: a sequence may have adopted blocks all the same; the next plan tells the backend.
            self._untold_tables = draft.tables
            return None
        self._untold_tables = []
        plan, sequences = draft.freeze(roster.kv_cache)
        if len(sequences) < len(roster.running):
            roster.rotate(draft.step)
        self._next_step += 1
        self._in_flight.append(PendingPlan(plan, sequences, draft.registered, is_retry))
        return plan

    def _plan_retry(self, draft: PlanBuilder) -> bool:
        """Plans the next half of a failed step, alone. False: there is none, or none of it can run just now."""
        while self._retries:
            group = [s for s in self._retries.popleft() if s.state is RequestState.RUNNING]
            self._planner.plan_only(draft, group)
            if draft.decodes or draft.prefills:
                return True
        return False

    # ------------------------------------------------------------------ what came back

    def apply(self, plan: IterationPlan, result: StepResult, seconds: float | None = None) -> None:
        """Commits a step that succeeded. `seconds` it took, where the engine measured it."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, "steps are applied in the order they were planned"
        assert len(result.tokens) == plan.num_samples, "a token for every sample"
        self._roster.applied_step = plan.step
        now = self._clock()
        num_told = len(self._outputs)
        self._take_prompt_logprobs(result)
        self._commit_decodes(flight, result, now)
        self._commit_drafts(flight, result, now)
        self._commit_prefills(flight, result, now)
        self.stats.tokens_generated += len(self._outputs) - num_told
        self._finish_swaps(result)
        self._roster.settle(plan.step)
        self._account(plan, seconds)
        self._planner.speculation.learn(plan, seconds, now, has_next=bool(self._in_flight))
        self._is_worth_waiting = self._planner.is_worth_waiting()

    def _commit_decodes(self, flight: PendingPlan, result: StepResult, now: float) -> None:
        """The loop that runs for every token of every stream: what is usual is done here, the rest elsewhere."""
        plan, block_size = flight.plan, self.info.block_size
        decoding, outputs, new = Phase.DECODE, self._outputs, tuple.__new__
        logprobs = result.logprobs if result.logprobs is not None else repeat(None)
        last_token_at, num_alike = now, 0
        entries = zip(flight.sequences, plan.starts, result.tokens, logprobs, strict=False)
        for sequence, start, token, logprob in islice(entries, plan.num_decodes):
            tokens = sequence.tokens
            length = len(tokens) + 1
            is_usual = sequence.phase is decoding and length < sequence.limit
            if not is_usual or token in sequence.stop_ids:
                self._commit(sequence, plan.step, start + 1)
                self._take_token(sequence, token, logprob, now)
                sequence.learn()
                continue
            tokens.append(token)
            sequence.computed = computed = start + 1
            if sequence.last_token_at != last_token_at:
                self._count_gaps(now - last_token_at, num_alike)
                last_token_at, num_alike = sequence.last_token_at, 0
            num_alike += 1
            sequence.last_token_at = now
            value: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if logprob is not None:
                if self.keeps_logprobs:
                    sequence.logprobs.append(logprob)
                value, top = logprob
            if computed % block_size == 0:
                self._roster.prefixes.register_generated(sequence)
            if sequence.guesser is not None:
                sequence.guesser.learn()
            outputs.append(
                new(TokenOutput, (sequence.request_id, token, "", value, False, None, length, top))
            )
        self._count_gaps(now - last_token_at, num_alike)

    def _commit_drafts(self, flight: PendingPlan, result: StepResult, now: float) -> None:
        """Takes what was sampled behind drafts that turned out right. The rest is as if it had not been computed."""
        plan, sampled = flight.plan, flight.plan.num_decodes
        for entry, drafts in enumerate(plan.drafts, plan.num_decodes):
            sequence, start = flight.sequences[entry], plan.starts[entry]
            tokens = result.tokens[sampled : sampled + 1 + len(drafts)]
            num_right = sum(takewhile(bool, map(eq, drafts, tokens)))
            gap = (now - sequence.last_token_at) / (1 + num_right)
            index = 0
            for index, token in enumerate(tokens[: 1 + num_right]):
                self._commit(sequence, plan.step, start + index + 1)
                logprob = None if result.logprobs is None else result.logprobs[sampled + index]
                self._take_token(sequence, token, logprob, now, gap)
                if sequence.finish_reason is not None:
                    break
            else:
                sequence.scheduled, sequence.target = sequence.computed, len(sequence.tokens)
                sequence.learn()
            self.stats.tokens_drafted += len(drafts)
            self.stats.drafts_accepted += index
            sampled += 1 + len(drafts)

    def _commit_prefills(self, flight: PendingPlan, result: StepResult, now: float) -> None:
        plan = flight.plan
        sampled = plan.first_prefill + sum(map(len, plan.drafts))
        for entry in range(plan.first_prefill, len(plan.rows)):
            sequence = flight.sequences[entry]
            self._commit(sequence, plan.step, plan.starts[entry] + plan.counts[entry])
            if plan.samples[entry]:
                logprob = None if result.logprobs is None else result.logprobs[sampled]
                self._take_token(sequence, result.tokens[sampled], logprob, now)
                sequence.learn()
                sampled += 1

    def _commit(self, sequence: Sequence, step: int, end: int) -> None:
        """What the step computed is in the cache for good, if its sequence still holds that memory."""
        if sequence.admitted_step <= step:
            sequence.computed = end

    def _take_prompt_logprobs(self, result: StepResult) -> None:
        for request_id, (first, logprobs) in result.prompt_logprobs.items():
            if request_id in self.sequences:
                self.sequences[request_id].prompt_logprobs.update(enumerate(logprobs, first))

    def _take_token(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprobs | None,
        now: float,
        gap: float | None = None,
    ) -> None:
        """Appends a sampled token, tells it, and ends the request where it is the last one. `gap`: its share of the time since
        the token before, where several come together."""
        if sequence.finish_reason is not None:
            return  # it ended while the step was in flight: the token is discarded
        sequence.tokens.append(token)
        length = len(sequence.tokens)
        if logprob is not None and self.keeps_logprobs:
            sequence.logprobs.append(logprob)
        if sequence.first_token_at is not None:
            self._count_gaps(now - sequence.last_token_at if gap is None else gap, 1)
        else:
            sequence.first_token_at = now
            target = sequence.request.ttft_target
            self.stats.ttft_targets_missed += target is not None and now - sequence.arrival > target
        sequence.last_token_at = now
        if sequence.phase is Phase.PREFILL:
            sequence.enter(Phase.DECODE, now)
        computed = sequence.computed
        if computed and computed % self.info.block_size == 0 and sequence.state is RequestState.RUNNING:
            self._roster.prefixes.register_generated(sequence)
        reason = None
        params = sequence.request.params
        is_eos = token in self.info.eos_token_ids and not params.ignore_eos
        # Before min_tokens a grammar lets the end be sampled only where nothing else is allowed.
        is_forced = is_eos and params.grammar is not None
        if token in sequence.stop_ids and (length >= sequence.min_length or is_forced):
            reason = FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
        elif length >= sequence.limit:
            reason = FinishReason.LENGTH
        value, top = logprob if logprob is not None else (None, ())
        self._outputs.append(
            TokenOutput(sequence.request_id, token, "", value, reason is not None, reason, length, top)
        )
        if reason is not None:
            self._complete(sequence, reason)

    def _count_gaps(self, gap: float, times: int) -> None:
        if times:
            self.token_gaps[gap] = self.token_gaps.get(gap, 0) + times

    def _account(self, plan: IterationPlan, seconds: float | None) -> None:
        num_tokens, first = plan.num_tokens, plan.num_decodes
        self.stats.steps += 1
        self.stats.tokens_computed += num_tokens
        asks_for_decodes = self.config.policy is PriorityPolicy.ADAPTIVE
        if seconds is not None and num_tokens and (plan.num_prefills or asks_for_decodes):
            prompts = zip(plan.starts[first:], plan.counts[first:], strict=True)
            pairs = sum(count * start + count * (count + 1) // 2 for start, count in prompts)
            self.cost_model.learn(
                prefill_tokens=sum(plan.counts[plan.first_prefill :]),
                tokens=num_tokens,
                context=sum(plan.starts) + num_tokens,
                pairs=sum(plan.starts[:first]) + first + pairs,
                seconds=seconds,
            )

    def _finish_swaps(self, result: StepResult) -> None:
        for swap_id in (*result.finished_swaps, *result.failed_swaps):
            failed = swap_id in result.failed_swaps
            if self._roster.finish_swap(swap_id, failed, self._next_step, self._clock()):
                self.stats.swaps_failed += failed

    # ------------------------------------------------------------------ what went wrong

    def fail(self, result: StepResult, behind: Iterable[StepResult] = ()) -> None:
        """Rolls back the oldest step in flight, which failed, and all behind it, whose results are discarded.

        Requests that the failure belongs to end; the rest is planned again. A failure that belongs to nobody is
        tried once more in halves, and ends the requests of the half that fails again.
        """
        failed = self._in_flight[0]
        self.stats.steps_failed += 1
        self._roll_back()
        for step_result in (result, *behind):
            self._finish_swaps(step_result)
        for request_id, error in result.errors.items():
            self._end_early(request_id, RequestState.FAILED, FinishReason.ERROR, error)
        if any(request_id in result.errors for request_id in failed.plan.request_ids):
            return
        message = result.error or "; ".join(result.errors.values())
        alive = [s for s in failed.sequences if s.finish_reason is None]
        if failed.is_retry:
            for sequence in alive:
                self._end_early(sequence.request_id, RequestState.FAILED, FinishReason.ERROR, message)
        else:
            half = (len(alive) + 1) // 2
            self._retries.extend(part for part in (alive[:half], alive[half:]) if part)

    def _roll_back(self) -> None:
        """None of the steps in flight will be."""
        flights = list(self._in_flight)
        self._in_flight.clear()
        self._roster.roll_back(
            [sequence for flight in flights for sequence in flight.sequences],
            [entry for flight in flights for entry in flight.registered],
            self._next_step - 1,
        )

    # ------------------------------------------------------------------ for tests

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks, rows, swap space, requests or steps do not add up."""
        self._roster.check_integrity()
        assert all(a.plan.step + 1 == b.plan.step for a, b in pairwise(self._in_flight)), "a step is missing"
