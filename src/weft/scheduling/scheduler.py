"""The scheduler: accepts requests, plans one step after another, and applies the results.

One iteration: `schedule()` returns a plan, the backend executes it, `apply()` commits the result (or `fail()` rolls the
step back). `schedule()` may plan ahead: it may be called again before the last plan is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from weft.clock import Clock
from weft.config import PriorityPolicy, SchedulerConfig
from weft.errors import InvalidRequestError, id_in_use
from weft.learned_costs import LearnedCosts, LearnedText
from weft.metrics import SchedulerStats, StepSeconds
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import (
    Failure,
    FailureKind,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    TokenOutput,
)
from weft.scheduling.budget import NO_LIMIT, TokenBudget
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.checks import check_request
from weft.scheduling.deadlines import Deadlines
from weft.scheduling.draft_tokens import Speculation
from weft.scheduling.pending_plan import PendingPlan
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.planner import Planner
from weft.scheduling.policy import AdmissionPolicy, StepCostModel
from weft.scheduling.preemption import PreemptionCause
from weft.scheduling.queue import RequestQueue
from weft.scheduling.reports import Reports
from weft.scheduling.sequence import Sequence
from weft.scheduling.sequence_table import SequenceTable
from weft.scheduling.token_committer import TokenCommitter
from weft.tiers import longest_sequence


class ContinuousBatchScheduler:
    """Not thread-safe: one thread calls it. Deterministic: the same calls and clock give the same plans."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, clock: Clock) -> None:
        self.config = config
        self.info = info
        self.stats = SchedulerStats()
        self.step_seconds = StepSeconds()
        self.cost_model = StepCostModel()
        self.max_sequence_length = longest_sequence(info)
        self._clock = clock
        self._policy = policy = AdmissionPolicy(config, self.cost_model)
        self._sequence_table = SequenceTable(config, info, policy)
        self.history = self._sequence_table.history
        self._planner = Planner(config, info, self._sequence_table, policy, self.cost_model, clock)
        self._in_flight: deque[PendingPlan] = deque()
        self._retries: deque[list[Sequence]] = deque()
        self._deadlines = Deadlines()
        self._reports = Reports(self._sequence_table, self.stats, clock)
        self.tokens = TokenCommitter(
            info, self._sequence_table, self._reports, self._planner.speculation, self.stats
        )
        self._unsent_tables: list[tuple[Sequence, int, int]] = []
        """New block-table entries of a planning round that returned no plan. The next plan sends them."""
        self._should_wait_for_tokens = False
        """Whether draft tokens, which need the tokens of the step in flight, save more than planning ahead."""
        self._next_order = 0
        self._next_step = 0

    @property
    def kv_cache(self) -> KvCacheManager:
        return self._sequence_table.kv_cache

    @property
    def queue(self) -> RequestQueue:
        return self._sequence_table.queue

    @property
    def idle_queue(self) -> RequestQueue:
        return self._sequence_table.idle_queue

    @property
    def running(self) -> list[Sequence]:
        return self._sequence_table.running

    @property
    def paused(self) -> list[Sequence]:
        """Idle sequences that hold memory, while interactive ones have work."""
        return self._sequence_table.paused

    @property
    def applied_step(self) -> int:
        """The last step whose result was applied. -1: none."""
        return self._sequence_table.applied_step

    @property
    def sequences(self) -> dict[RequestId, Sequence]:
        """All sequences that have not ended."""
        return self._sequence_table.sequences

    @property
    def resuming(self) -> list[Sequence]:
        """Preempted sequences whose swap-in is in flight."""
        return list(self._sequence_table.resuming.values())

    @property
    def has_work(self) -> bool:
        return bool(self._sequence_table.sequences or self._in_flight)

    @property
    def has_outputs(self) -> bool:
        return self._reports.has_any

    @property
    def may_plan_ahead(self) -> bool:
        """Whether `schedule()` may be called before the step in flight is applied. Not during a retry, not if that step or
        the next one has draft tokens, and not after a short step of idle work."""
        if self._should_wait_for_tokens or self.is_retrying:
            return False
        return not self._in_flight or not (self._in_flight[-1].plan.drafts or self._in_flight[-1].is_short)

    @property
    def has_more_to_plan(self) -> bool:
        """Whether a sequence has work that is in no step in flight."""
        table = self._sequence_table
        if table.queue or table.idle_queue or table.paused or table.resuming:
            return True
        return not all(s.is_finishing for s in table.running)

    @property
    def is_retrying(self) -> bool:
        """Whether a failed step is retried in halves. Each half must succeed before the next step is planned."""
        return bool(self._retries) or (bool(self._in_flight) and self._in_flight[-1].is_retry)

    @property
    def speculation(self) -> Speculation:
        return self._planner.speculation

    def learned_costs(self) -> LearnedCosts:
        """The learned costs of steps, for a later run on this machine. If the numbers are not valid: the default, which
        has no costs."""
        try:
            return LearnedCosts.of(**self.cost_model.sums, **self.speculation.costs.means)
        except ValueError:
            return LearnedCosts()

    def restore_costs(self, costs: LearnedCosts) -> None:
        """Replaces the learned costs by those of an earlier run. The default of `LearnedCosts` has none."""
        self.cost_model.restore(costs)
        self.speculation.costs.restore(costs)

    def restore_answers(self, texts: Iterable[LearnedText]) -> None:
        """Adds finished answers of an earlier run. Texts with tokens that the model does not have are left out."""
        size = self.info.vocabulary_size
        self.speculation.answers.restore(
            text for text in texts if all(0 <= token < size for token in text.tokens)
        )

    def forget_answers(self) -> None:
        """Drops the finished answers from which draft tokens are taken."""
        self.speculation.forget_answers()

    # ------------------------------------------------------------------ requests begin and end

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequestError for a request that can never run. Thread-safe."""
        check_request(request, self.info.vocabulary_size, self._max_length(request), self.config)

    def prepare(self, sequence: Sequence) -> None:
        """Checks a sequence and computes its block hashes, which is slow for a long prompt. Changes only the sequence,
        so any thread may call it."""
        request = sequence.request
        if request.params.n != 1:
            raise InvalidRequestError(
                f"n is {request.params.n}; allowed here: 1; use `submit_choices` for several answers",
                field="n",
            )
        self.check(request)
        sequence.limit = min(sequence.limit, self._max_length(request))
        if not request.params.ignore_eos:
            sequence.stop_ids |= self.info.eos_token_ids
        sequence.needs_last_token = request.params.grammar is not None and not self.info.grammars_may_overlap
        self._sequence_table.prefixes.extend_block_hashes(sequence)
        self._planner.speculation.attach_proposer(sequence)
        sequence.is_prepared = True

    def _max_length(self, request: InferenceRequest) -> int:
        """The most tokens that the sequence may have, prompt included."""
        limit = request.max_sequence_length
        return self.max_sequence_length if limit is None else min(self.max_sequence_length, limit)

    def add(self, *sequences: Sequence) -> None:
        """Queues new sequences: all of them or, on InvalidRequestError or QueueFullError, none."""
        for sequence in sequences:
            if not sequence.is_prepared:
                self.prepare(sequence)
            request_id = sequence.request_id
            # A request that was cancelled holds its memory until its last step ends.
            if request_id in self.sequences or self.kv_cache.holds(request_id):
                raise id_in_use(request_id)
        table = self._sequence_table
        queue = table.queue_of(sequences[0])
        queue.check_room(sum(s.prompt_length for s in sequences), len(sequences))
        now = self._clock()
        is_recorded = now < self.history.until
        for sequence in sequences:
            sequence.order = self._next_order
            self._next_order += 1
            sequence.arrival = sequence.phase_since = now
            # Idle work and interactive requests are counted apart: the order of one must not depend on the other.
            num_own = table.num_idle if sequence.is_idle_work else len(self.sequences) - table.num_idle
            self._policy.set_cost(sequence, rows=max(1, num_own - len(queue)))
            if sequence.request.deadline is not None:
                sequence.deadline_at = now + sequence.request.deadline
                self._deadlines.add(sequence)
            self.sequences[sequence.request_id] = sequence
            if sequence.is_idle_work:
                table.num_idle += 1
            else:
                table.interactive_at = now
            queue.push(sequence)
            self.stats.prompt_tokens += sequence.prompt_length
            if is_recorded:
                length = sequence.prompt_length
                self.history.events.append((now, self.applied_step, "queued", sequence.request_id, length, 0))

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        """Ends a request in any state. False: it has ended already, or is unknown."""
        return self._reports.end(self.sequences.get(request_id), Failure(FailureKind.CANCELLED, reason or ""))

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        """Ends a request after `num_tokens` generated tokens, because a stop string was found. False: it has ended
        already."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        del sequence.tokens[sequence.prompt_length + num_tokens :]
        del sequence.logprobs[num_tokens:]
        has_ended = self._reports.end(sequence, None)
        if has_ended and sequence is not None:
            self._planner.speculation.keep(sequence)
        return has_ended

    def drop_deadline(self, request_id: RequestId) -> bool:
        """Removes the deadline of a request. False: it has ended already."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            sequence.deadline_at = None
        return sequence is not None

    def fail_request(self, request_id: RequestId, failure: Failure) -> bool:
        """Ends a request with an error from outside the steps. False: it has ended already."""
        return self._reports.end(self.sequences.get(request_id), failure)

    def abandon(self, error: str) -> None:
        """Reports every request as failed, and frees nothing: for a scheduler whose state is broken."""
        self._reports.abandon(error)

    def take_outputs(self) -> tuple[list[TokenOutput], list[GenerationResult]]:
        """Returns the outputs since the last call, in order, and the results of the requests that ended."""
        return self._reports.take()

    def _expire(self) -> None:
        """Ends requests whose deadline has passed, and sessions that have expired."""
        deadlines, sessions = self._deadlines, self._sequence_table.sessions
        if not deadlines and not sessions:
            return
        now = self._clock()
        sessions.expire(now)
        for sequence in deadlines.take_expired(now):
            waited = now - sequence.arrival
            message = f"deadline of {sequence.request.deadline:g} s passed after {waited:.3f} s"
            self._reports.end(sequence, Failure(FailureKind.DEADLINE, message))
        deadlines.compact(len(self.sequences))

    # ------------------------------------------------------------------ planning

    def schedule(self) -> IterationPlan | None:
        """Plans one step over all waiting and running sequences. None: there is nothing to do now."""
        assert not (self._in_flight and self._in_flight[-1].plan.drafts), (
            "the step in flight has draft tokens"
        )
        self._expire()
        config, sequence_table = self.config, self._sequence_table
        budget = TokenBudget(config.max_tokens_per_step, config.max_prefill_tokens, config.sequences_per_step)
        builder = PlanBuilder(self._next_step, budget, self._unsent_tables)
        is_retry = self._plan_retry(builder)
        if not is_retry:
            self._planner.plan(builder)
        if builder.preempted:
            self.stats.preemptions_by_swap += len(builder.swap_out)
            self.stats.preemptions_by_recompute += len(builder.preempted) - len(builder.swap_out)
            causes = builder.preemption_causes
            self.stats.preemptions_for_memory += causes.count(PreemptionCause.MEMORY)
            self.stats.preemptions_for_priority += causes.count(PreemptionCause.PRIORITY)
            self.stats.preemptions_for_interactive += causes.count(PreemptionCause.INTERACTIVE)
            self.stats.swap_bytes_out += self.kv_cache.swap_bytes(builder.swap_out)
        if builder.swap_in:
            self.stats.swap_bytes_in += self.kv_cache.swap_bytes(builder.swap_in)
        if builder.is_empty and (self._in_flight or not sequence_table.resuming):
            # NOTE: without a plan, block tables may still have new entries, for example for cached blocks that a
            # sequence now shares. The next plan sends these entries.
            self._unsent_tables = builder.tables
            return None
        self._unsent_tables = []
        plan, sequences = builder.freeze(sequence_table.kv_cache)
        if len(sequences) < len(sequence_table.running) + len(sequence_table.paused):
            sequence_table.rotate(builder.step)
        self._next_step += 1
        is_short = budget.seconds < NO_LIMIT
        self._in_flight.append(PendingPlan(plan, sequences, builder.registered, is_retry, is_short))
        return plan

    def _plan_retry(self, builder: PlanBuilder) -> bool:
        """Plans the next half of a failed step, without other sequences. False: no half is left that can run now."""
        while self._retries:
            group = [s for s in self._retries.popleft() if s.state is RequestState.RUNNING]
            self._planner.plan_only(builder, group)
            if builder.decodes or builder.prefills:
                return True
        return False

    # ------------------------------------------------------------------ results of steps

    def apply(self, plan: IterationPlan, result: StepResult, seconds: float | None = None) -> None:
        """Commits a step that succeeded. `seconds` is its duration, if the engine measured it."""
        pending = self._in_flight.popleft()
        assert pending.plan is plan, "steps must be applied in plan order"
        assert len(result.tokens) == plan.num_samples, "the result must hold one token per sample"
        self._sequence_table.applied_step = plan.step
        now = self._clock()
        self.tokens.commit(pending, result, now)
        self._finish_swaps(result)
        self._sequence_table.settle(plan.step)
        self._account(plan, seconds)
        if now < self.history.until:
            self.history.add_step(plan, seconds)
        self._planner.speculation.learn(plan, seconds, now, has_next=bool(self._in_flight))
        self._should_wait_for_tokens = self._planner.should_wait_for_tokens()

    def _account(self, plan: IterationPlan, seconds: float | None) -> None:
        """Counts a step, and adds its duration to the cost model. A token makes one pair with each position up to its
        own."""
        num_tokens, first = plan.num_tokens, plan.num_decodes
        self.stats.steps += 1
        self.stats.tokens_computed += num_tokens
        self.stats.step_sequences += len(plan.rows)
        if seconds is not None and num_tokens:
            kinds = self.step_seconds
            of_prompts = kinds.mixed if plan.first_prefill else kinds.prefill
            (of_prompts if plan.num_prefills else kinds.decode).record(seconds)
        needs_decodes = self.config.policy is PriorityPolicy.ADAPTIVE
        if seconds is not None and num_tokens and (plan.num_prefills or needs_decodes):
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
            if self._sequence_table.finish_swap(swap_id, failed, self._next_step, self._clock()):
                self.stats.swaps_failed += failed

    # ------------------------------------------------------------------ failed steps

    def fail(self, result: StepResult, later_results: Iterable[StepResult] = ()) -> None:
        """Rolls back the oldest step in flight, which failed, and all later ones. Their results are discarded.

        Requests with an error of their own end; the others are planned again. A failure without such a request is
        retried in halves, and ends the requests of a half that fails again.
        """
        failed = self._in_flight[0]
        self.stats.steps_failed += 1
        self._roll_back()
        for step_result in (result, *later_results):
            self._finish_swaps(step_result)
        for sequence in failed.sequences if result.errors else ():
            if (failure := result.errors.get(sequence.request_id)) is not None:
                self._reports.end(sequence, failure)
        if any(request_id in result.errors for request_id in failed.plan.request_ids):
            return
        message = result.error or "; ".join(failure.message for failure in result.errors.values())
        alive = [s for s in failed.sequences if s.finish_reason is None]
        if failed.is_retry:
            for sequence in alive:
                self._reports.end(sequence, Failure(FailureKind.STEP, message))
        else:
            half = (len(alive) + 1) // 2
            self._retries.extend(part for part in (alive[:half], alive[half:]) if part)

    def _roll_back(self) -> None:
        """Discards all steps in flight."""
        pending_plans = list(self._in_flight)
        self._in_flight.clear()
        self._sequence_table.roll_back(
            [sequence for pending in pending_plans for sequence in pending.sequences],
            [block for pending in pending_plans for block in pending.registered],
            self._next_step - 1,
        )

    # ------------------------------------------------------------------ for tests

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks, rows, swap slots, sequences or steps are inconsistent."""
        self._sequence_table.check_integrity()
        self._planner.speculation.answers.check_integrity()
        assert all(a.plan.step + 1 == b.plan.step for a, b in pairwise(self._in_flight)), "a step is missing"
