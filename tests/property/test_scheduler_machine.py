"""Drives the scheduler in any order that an engine could, on the noop backend, which detects errors."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import KvCacheKind, KvCachePoolConfig, PreemptionMode, PriorityPolicy, SchedulerConfig
from weft.engine.loop import Rejected
from weft.errors import InvalidRequestError, QueueFullError
from weft.plan import IterationPlan, StepResult, SwapTask
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
)
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

VOCABULARY = 40
MAX_AHEAD = 2


class ScriptedFaults:
    """Fails exactly what the machine requested, once."""

    def __init__(self) -> None:
        self.reject_next = False
        self.fail_next_result = False
        self.culprit: int | None = None
        self.fail_next_swap = False
        self.culprits: set[RequestId] = set()
        self.num_unattributed = 0

    def at_submit(self, plan: IterationPlan) -> str | None:
        if not self.reject_next:
            return None
        self.reject_next = False
        self.num_unattributed += 1
        return "out of memory"

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        if self.culprit is not None and plan.request_ids:
            culprit = plan.request_ids[self.culprit % len(plan.request_ids)]
            self.culprit = None
            self.culprits.add(culprit)
            return None, {culprit: Failure(FailureKind.STEP, "its own fault")}
        if self.fail_next_result and plan.request_ids:
            self.fail_next_result = False
            self.num_unattributed += 1
            return "the device failed", {}
        return None, {}

    def at_wait(self, plan: IterationPlan) -> str | None:
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        failed, self.fail_next_swap = self.fail_next_swap, False
        return "host memory is gone" if failed else None


@dataclass
class Known:
    """The test's record of a request."""

    sequence: Sequence
    expected: list[int]
    arrival: float
    cancelled: bool = False
    result: GenerationResult | None = None


@st.composite
def scheduler_configs(draw: st.DrawFn) -> SchedulerConfig:
    max_running = draw(st.integers(1, 5))
    per_step = draw(st.none() | st.integers(1, max_running))
    chunked = draw(st.booleans())
    floor = (per_step or max_running) + (0 if chunked else 1)
    tokens = draw(st.integers(floor, floor + 24))
    return SchedulerConfig(
        policy=draw(st.sampled_from(PriorityPolicy)),
        max_running=max_running,
        max_sequences_per_step=per_step,
        max_tokens_per_step=tokens,
        max_prefill_tokens=draw(st.integers(1, tokens)),
        max_chunk_tokens=draw(st.integers(1, 12)),
        chunked_prefill=chunked,
        prefer_pure_decode=draw(st.booleans()),
        dynamic_batching=draw(st.sampled_from([True, True, True, False])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        preemption=draw(st.sampled_from(PreemptionMode)),
        ageing_rate=draw(st.sampled_from([0.0, 0.1, 5.0])),
        max_waiting_requests=draw(st.sampled_from([2, 50])),
        max_waiting_tokens=draw(st.sampled_from([30, 10_000])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the calls that an engine may make. The invariants are checked after each of them."""

    @initialize(
        config=scheduler_configs(),
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        swap_blocks=st.sampled_from([0, 3, 50]),
        tail_blocks=st.sampled_from([0, 0, 1, 2]),
        seed=st.none() | st.integers(0, 999),
        costs=st.sampled_from([(1e-4, 1e-4), (1e-2, 1e-4), (1e-4, 1e-2)]),
        extra_rows_are_cheap=st.booleans(),
    )
    def start(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        swap_blocks: int,
        tail_blocks: int,
        seed: int | None,
        costs: tuple[float, float],
        extra_rows_are_cheap: bool,
    ) -> None:
        self.config = config
        self.faults = ScriptedFaults()
        self.clock = VirtualClock()
        self.backend = NoopBackend(
            vocabulary_size=VOCABULARY,
            max_context=30,
            eos_token_ids=frozenset({7}),
            random_source=None if seed is None else random.Random(seed),
            faults=self.faults,
            recompute_seconds_per_token=costs[0],
            swap_seconds_per_block=costs[1],
            extra_rows_are_cheap=extra_rows_are_cheap,
        )
        cache = KvCachePoolConfig(num_blocks, block_size, swap_blocks)
        if tail_blocks:
            # The rest of the machine is the same: tiers must not change any result.
            cache = dataclasses.replace(
                cache,
                kv_cache=KvCacheKind.TWO_TIER,
                tail_length=tail_blocks * block_size,
                num_blocks=tail_blocks + 2 + num_blocks // 2,
                store_blocks=max(2, num_blocks - tail_blocks),
            )
        self.info = self.backend.allocate(cache, config.max_running)
        self.scheduler = ContinuousBatchScheduler(config, self.info, self.clock)
        self.in_flight: deque[tuple[IterationPlan, object]] = deque()
        self.known: dict[RequestId, Known] = {}
        self.reported: dict[RequestId, list[int]] = {}
        self.finals: Counter[RequestId] = Counter()
        self.next_id = 0
        self.max_length = self.scheduler.max_sequence_length

    # ------------------------------------------------------------------ rules

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        priority=st.sampled_from(Priority),
        stop=st.none() | st.integers(0, VOCABULARY - 1),
        ignore_eos=st.booleans(),
        deadline=st.sampled_from([None, None, None, 0.0, 1.0, 8.0]),
        ttft=st.sampled_from([None, 0.5]),
        salt=st.sampled_from(["", "", "s"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        longest=st.none() | st.integers(2, 40),
        is_idle_work=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        family: int,
        length: int,
        max_tokens: int,
        min_tokens: int,
        priority: Priority,
        stop: int | None,
        ignore_eos: bool,
        deadline: float | None,
        ttft: float | None,
        salt: str,
        prompt_logprobs: int | None,
        longest: int | None,
        is_idle_work: bool,
    ) -> None:
        # Prompts of one family share a prefix, so that there are prefix hits.
        prompt = [(family * 11 + position * 3) % VOCABULARY for position in range(length)]
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=() if stop is None else (stop,),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        request = InferenceRequest(
            tuple(prompt),
            params,
            priority=priority,
            deadline=deadline,
            ttft_target=ttft,
            cache_salt=salt,
            max_sequence_length=longest,
            is_idle_work=is_idle_work,
            request_id=RequestId(str(self.next_id)),
        )
        sequence = Sequence(request, seed=self.next_id % 3)
        self.next_id += 1
        limit = min(self.max_length, longest or self.max_length)
        waiting = len(self.scheduler.idle_queue if is_idle_work else self.scheduler.queue)
        try:
            self.scheduler.add(sequence)
        except InvalidRequestError:
            too_long = not self.config.chunked_prefill and length > self.config.longest_whole_prompt
            assert length >= limit or too_long, "a request that fits was rejected"
            return
        except QueueFullError:
            assert waiting >= min(self.config.max_waiting_requests, 1)
            return
        assert length < limit
        expected = generate_alone(prompt, sequence.seed, params, min(limit, length + max_tokens), self.info)
        self.known[sequence.request_id] = Known(sequence, expected, self.clock())

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        known = list(self.known.values())[which % len(self.known)]
        is_over = known.sequence.state.is_over
        assert self.scheduler.cancel(known.sequence.request_id, "unwanted") is not is_over
        known.cancelled |= not is_over
        self.collect()

    @rule()
    def schedule(self) -> None:
        if self.may_schedule:
            self.plan_one()

    @rule()
    def step(self) -> None:
        """Schedules and finishes, as the plain loop does, so that runs progress."""
        if self.may_schedule:
            self.plan_one()
        if self.in_flight:
            self.finish_oldest()

    @rule(times=st.integers(1, 6))
    def step_ahead(self, times: int) -> None:
        """As the overlapped loop does: plans the next step before the last one is finished."""
        for _ in range(times):
            if self.may_schedule:
                self.plan_one()
            if len(self.in_flight) >= MAX_AHEAD:
                self.finish_oldest()
            self.scheduler.check_integrity()

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish(self) -> None:
        self.finish_oldest()

    @rule(seconds=st.sampled_from([0.0, 0.3, 2.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(kind=st.sampled_from(["reject", "result", "culprit", "swap"]), which=st.integers(0, 10))
    def arm_fault(self, kind: str, which: int) -> None:
        if kind == "reject":
            self.faults.reject_next = True
        elif kind == "result":
            self.faults.fail_next_result = True
        elif kind == "culprit":
            self.faults.culprit = which
        else:
            self.faults.fail_next_swap = True

    # ------------------------------------------------------------------ what the engine does

    @property
    def may_schedule(self) -> bool:
        if len(self.in_flight) >= MAX_AHEAD:
            return False
        if not self.in_flight:
            return True
        return self.scheduler.may_plan_ahead and not isinstance(self.in_flight[-1][1], Rejected)

    def plan_one(self) -> None:
        plan = self.scheduler.schedule()
        self.collect()
        if plan is None:
            if not self.in_flight:
                assert not self.scheduler.sequences, (
                    "requests wait, no step is in flight, and none is planned"
                )
            return
        self.check_plan(plan)
        handle: object
        try:
            handle = self.backend.submit(plan)
        except RuntimeError as error:
            handle = Rejected(plan, str(error))
        self.in_flight.append((plan, handle))

    def finish_oldest(self) -> None:
        plan, handle = self.in_flight.popleft()
        result: StepResult = handle.result()  # type: ignore[attr-defined]
        if result.failed:
            later_results = [later.result() for _, later in self.in_flight]  # type: ignore[attr-defined]
            self.in_flight.clear()
            self.scheduler.fail(result, later_results)
        else:
            self.scheduler.apply(plan, result, seconds=0.001 + 0.0001 * plan.num_tokens)
        self.collect()

    def collect(self) -> None:
        outputs, results = self.scheduler.take_outputs()
        for output in outputs:
            self.take(output)
        for result in results:
            known = self.known[result.request_id]
            assert known.result is None, "a request ended twice"
            known.result = result
            self.check_result(known, result)

    def take(self, output: TokenOutput) -> None:
        assert not self.finals[output.request_id], "an output was reported after the final one"
        tokens = self.reported.setdefault(output.request_id, [])
        known = self.known[output.request_id]
        if output.token_id is not None:
            tokens.append(output.token_id)
        assert output.sequence_length == known.sequence.prompt_length + len(tokens)
        assert output.is_final is (output.finish_reason is not None)
        self.finals[output.request_id] += output.is_final

    # ------------------------------------------------------------------ invariants

    def check_plan(self, plan: IterationPlan) -> None:
        config = self.config
        prefills = plan.prefill_tasks
        assert plan.num_tokens == sum(plan.counts) <= config.max_tokens_per_step
        assert sum(task.num_tokens for task in prefills) <= config.max_prefill_tokens
        assert len(plan.rows) <= config.sequences_per_step
        assert len(set(plan.rows)) == len(plan.rows) and len(set(plan.request_ids)) == len(plan.request_ids)
        assert all(count > 0 for count in plan.counts)
        if config.chunked_prefill:
            assert all(task.num_tokens <= config.max_chunk_tokens for task in prefills)
        if config.prefer_pure_decode:
            assert not (prefills and plan.num_decodes), "a pure step holds both prompts and decodes"
        busy = {
            row: rid
            for pending, _ in self.in_flight
            for row, rid in zip(pending.rows, pending.request_ids, strict=True)
        }
        for row, request_id in zip(plan.rows, plan.request_ids, strict=True):
            assert busy.get(row, request_id) == request_id, "a row in flight was allocated to another request"
        for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True):
            sequence = self.known[request_id].sequence
            assert sequence.state is RequestState.RUNNING, "a request in the plan is not running"
            assert start + count <= sequence.limit - 1, "more positions are computed than can be used"
        if not self.scheduler.is_retrying:
            self.check_idle_work(plan)
        assert set(plan.preempted).isdisjoint(plan.request_ids), "a preempted request is still in the plan"
        swapped = [task.request_id for task in (*plan.swap_out, *plan.swap_in)]
        assert set(swapped).isdisjoint(plan.request_ids)

    def check_idle_work(self, plan: IterationPlan) -> None:
        planned = [self.known[request_id].sequence for request_id in plan.request_ids]
        interactive = [s for s in self.scheduler.sequences.values() if not s.is_idle_work]
        if all(s.is_finishing and s not in planned for s in interactive):
            assert not self.scheduler.paused, "a sequence is paused although no interactive request has work"
        elif any(s.is_idle_work for s in planned):
            assert self.info.extra_rows_are_cheap, "a step has idle work and interactive requests"
            assert not self.scheduler.queue, "a step has idle work, and an interactive request waits"
            assert not any(self.known[task.request_id].sequence in interactive for task in plan.prefill_tasks)

    def check_result(self, known: Known, result: GenerationResult) -> None:
        tokens, expected = list(result.tokens), known.expected
        assert tokens == self.reported.get(result.request_id, []), (
            "the result differs from the reported tokens"
        )
        assert self.finals[result.request_id] == 1
        if result.state is RequestState.COMPLETED:
            assert tokens == expected
            last = tokens[-1]
            long_enough = len(tokens) >= known.sequence.request.params.min_tokens
            if long_enough and last == 7 and not known.sequence.request.params.ignore_eos:
                assert result.finish_reason is FinishReason.END_OF_SEQUENCE
            elif long_enough and last in known.sequence.request.params.stop_token_ids:
                assert result.finish_reason is FinishReason.STOP
            else:
                assert result.finish_reason is FinishReason.LENGTH
        else:
            assert tokens == expected[: len(tokens)]
        if result.state is RequestState.FAILED:
            assert result.finish_reason is FinishReason.ERROR and result.error
            is_culprit = result.request_id in self.faults.culprits
            assert is_culprit or self.faults.num_unattributed >= 2, "a request failed without a cause"
        if result.state is RequestState.CANCELLED:
            assert result.finish_reason is FinishReason.CANCELLED
            assert (
                known.cancelled or known.sequence.request.deadline is not None or result.error == "unwanted"
            )
        assert min(result.waiting_time, result.prefill_time, result.decode_time) >= 0
        assert abs(result.total_time - (self.clock() - known.arrival)) < 1e-6, (
            "the phases do not add up to the total time"
        )

    @invariant()
    def no_request_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        alive = {rid for rid, known in self.known.items() if known.result is None}
        assert alive == self.scheduler.sequences.keys(), "a request was lost, or still exists after its end"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.faults.reject_next = self.faults.fail_next_result = self.faults.fail_next_swap = False
        self.faults.culprit = None
        steps_left = 400 + 60 * sum(len(k.sequence.tokens) + 12 for k in self.known.values())
        while self.scheduler.has_work:
            steps_left -= 1
            assert steps_left, "some requests never end"
            if self.may_schedule:
                self.plan_one()
            if self.in_flight:
                self.finish_oldest()
            self.scheduler.check_integrity()
            self.clock.advance(0.01)
        self.collect()
        for known in self.known.values():
            assert known.result is not None, "a request never ended"
        stats = self.scheduler.kv_cache.stats()
        assert (stats.rows_used, stats.blocks_used, stats.swap_blocks_used, stats.requests_swapped) == (
            0,
            0,
            0,
            0,
        )
        assert (stats.store_blocks_used, stats.store_swap_blocks_used) == (0, 0)
        for queue in (self.scheduler.queue, self.scheduler.idle_queue):
            assert len(queue) == 0 and queue.waiting_tokens == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSchedulerKeepsItsInvariantsInAnyOrderOfCalls = SchedulerMachine.TestCase


def test_a_preempted_request_whose_only_step_failed_starts_again_and_ends_once() -> None:
    """It is swapped out while its first chunk is in flight, then that step fails: no computed token is left."""
    clock = VirtualClock()
    faults = ScriptedFaults()
    backend = NoopBackend(max_context=64, faults=faults)
    info = backend.allocate(KvCachePoolConfig(num_blocks=4, block_size=2, swap_blocks=8), 2)
    config = SchedulerConfig(policy=PriorityPolicy.PRIORITY, max_running=2, preemption=PreemptionMode.SWAP)
    scheduler = ContinuousBatchScheduler(config, info, clock)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    ids = RequestId("low"), RequestId("high")
    low = Sequence(InferenceRequest((1, 2, 3, 4, 5), params, Priority.LOW, request_id=ids[0]), 0)
    high = Sequence(InferenceRequest((6, 7, 8, 9, 10), params, Priority.HIGH, request_id=ids[1]), 1)
    scheduler.add(low)
    first = scheduler.schedule()
    assert first is not None and first.request_ids == ids[:1]
    faults.fail_next_result = True
    first_handle = backend.submit(first)
    scheduler.add(high)
    second = scheduler.schedule()
    assert second is not None and [task.request_id for task in second.swap_out] == [ids[0]]
    second_handle = backend.submit(second)
    scheduler.fail(first_handle.result(), [second_handle.result()])
    scheduler.check_integrity()
    for _ in range(50):
        plan = scheduler.schedule()
        if plan is None:
            break
        scheduler.apply(plan, backend.submit(plan).result())
        scheduler.check_integrity()
    results = {result.request_id: result for result in scheduler.take_outputs()[1]}
    for sequence in (low, high):
        expected = generate_alone(sequence.request.prompt, sequence.seed, params, sequence.limit, info)
        assert list(results[sequence.request_id].tokens) == expected
    assert not scheduler.running and not scheduler.has_work
