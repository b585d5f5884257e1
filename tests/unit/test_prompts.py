"""The order of prompts, and the sizes of their chunks, on a machine with known costs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig
from weft.plan import IterationPlan
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams
from weft.scheduling.prompt_order import SHARE_OF_TARGET, TTFT_FACTOR
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

BLOCK = 16
BASE, PER_TOKEN, PER_CONTEXT, PER_PAIR = 0.002, 4e-4, 5e-7, 3e-7
TARGET = 0.1
ANY_POLICY = pytest.mark.parametrize("policy", list(PriorityPolicy), ids=lambda policy: policy.value)


def chunk_seconds(start: int, tokens: int) -> float:
    pairs = tokens * start + tokens * (tokens + 1) / 2
    return PER_TOKEN * tokens + PER_CONTEXT * (start + tokens) + PER_PAIR * pairs


def alone(prompt: int) -> float:
    """Seconds of a prefill of `prompt` tokens, without the fixed seconds of its steps."""
    return chunk_seconds(0, prompt)


class Machine:
    """The scheduler on the noop backend, on a clock that advances by the costs above. The cost model is trained already."""

    def __init__(self, policy: PriorityPolicy = PriorityPolicy.ADAPTIVE, **options: Any) -> None:
        self.clock = VirtualClock()
        self.backend = NoopBackend(max_context=8192)
        pool = KvCachePoolConfig(num_blocks=4096, block_size=BLOCK)
        config = SchedulerConfig(
            **{"policy": policy, "max_running": 64, "target_inter_token_latency": TARGET, **options}
        )
        info = self.backend.allocate(pool, config.max_running)
        self.scheduler = ContinuousBatchScheduler(config, info, self.clock)
        self.first_token_at: dict[RequestId, float] = {}
        self.max_in_progress = 0
        self._ids = count()
        for step in range(40):
            decodes, context, start, tokens = step % 7, 300 * (step % 5), 100 * (step % 11), 16 * (step % 9)
            seconds = BASE + chunk_seconds(start, tokens) + decodes * PER_TOKEN
            seconds += (PER_CONTEXT + PER_PAIR) * context
            self.scheduler.cost_model.learn(
                prefill_tokens=tokens,
                tokens=decodes + tokens,
                context=context + start + tokens,
                pairs=context + tokens * start + tokens * (tokens + 1) // 2,
                seconds=seconds,
            )

    def add(self, length: int, max_tokens: int = 4, family: int | None = None, **fields: Any) -> Sequence:
        """Adds a prompt. Prompts of one family share a prefix, others share nothing."""
        number = next(self._ids)
        first = 10_000 + number if family is None else family
        prompt = (first, *range(1, length))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sequence = Sequence(
            InferenceRequest(prompt, params, request_id=RequestId(str(number)), **fields), seed=0
        )
        self.scheduler.add(sequence)
        return sequence

    def seconds(self, plan: IterationPlan) -> float:
        """The duration of a step, equal to what the cost model has learned."""
        entries = zip(plan.starts, plan.counts, strict=True)
        return BASE + sum(chunk_seconds(start, tokens) for start, tokens in entries)

    def step(self) -> IterationPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.clock.advance(self.seconds(plan))
            self.scheduler.apply(plan, self.backend.submit(plan).result())
        self.scheduler.check_integrity()
        for output in self.scheduler.take_outputs()[0]:
            self.first_token_at.setdefault(output.request_id, self.clock())
        running = self.scheduler.running
        self.max_in_progress = max(
            self.max_in_progress, sum(0 < s.scheduled < s.prompt_length for s in running)
        )
        return plan

    def run(self, arrivals: Iterable[tuple[float, int]] = (), max_tokens: int = 4, **fields: Any) -> Machine:
        """Runs to the end. `arrivals` are (time, prompt length)."""
        pending = sorted(arrivals, reverse=True)
        while pending or self.scheduler.has_work:
            while pending and pending[-1][0] <= self.clock():
                self.add(pending.pop()[1], max_tokens, **fields)
            if self.step() is None and pending:
                self.clock.advance_to(pending[-1][0])
        return self

    def last_overtaken_by(self, sequence: Sequence, arrivals: list[tuple[float, int]]) -> float:
        """The latest arrival that overtook `sequence`: it got its first token before it."""
        own = self.first_token_at[sequence.request_id]
        times = enumerate((at for at, _ in arrivals), sequence.order + 1)
        return max(at for number, at in times if self.first_token(number) < own)

    def first_token(self, number: int) -> float:
        return self.first_token_at[RequestId(str(number))]

    def waited(self, sequence: Sequence) -> float:
        return self.first_token_at[sequence.request_id] - sequence.arrival


# ---------------------------------------------------------------------- order


@ANY_POLICY
def test_prompts_finish_in_order_of_arrival_with_few_in_progress_at_once(
    policy: PriorityPolicy,
) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    machine.run([(0.05 * number, 480) for number in range(20)], max_tokens=40)
    in_order = [machine.first_token(number) for number in range(20)]
    assert in_order == sorted(in_order)
    assert machine.max_in_progress <= 2, "the first one, and one that uses the rest of the step"


@ANY_POLICY
def test_a_short_prompt_overtakes_a_long_one_that_arrived_shortly_before(policy: PriorityPolicy) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    long = machine.add(2000)
    machine.step()
    short = machine.add(40)
    machine.step()
    machine.step()
    assert short.first_token_at is not None and long.first_token_at is None


@ANY_POLICY
def test_short_prompts_do_not_wait_for_a_very_long_prompt_in_progress(policy: PriorityPolicy) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    long = machine.add(6000)
    machine.step()
    shorts = [(0.1 + 0.05 * number, 32) for number in range(64)]
    machine.run(shorts)
    # A short prompt waits for the step in flight, and is computed in the next one.
    slowest = max(machine.first_token(number + 1) - at for number, (at, _) in enumerate(shorts))
    assert slowest <= 3 * (BASE + chunk_seconds(6000, 200))
    assert machine.waited(long) > alone(6000)


@ANY_POLICY
def test_short_prompts_do_not_wait_for_long_prompts_that_wait_before_them(policy: PriorityPolicy) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    longs = [machine.add(3000) for _ in range(10)]
    machine.step()
    shorts = [(0.1 + 0.1 * number, 32) for number in range(32)]
    machine.run(shorts)
    # Ten long prompts must start before the first short one. One step does that, besides the step in flight.
    slowest = max(machine.first_token(number + 10) - at for number, (at, _) in enumerate(shorts))
    assert slowest <= 4 * (BASE + chunk_seconds(3000, 200))
    in_order = [machine.first_token_at[long.request_id] for long in longs]
    assert in_order == sorted(in_order) and in_order[1] - in_order[0] > alone(3000)


@ANY_POLICY
def test_a_very_long_prompt_is_overtaken_only_for_a_bounded_time(
    policy: PriorityPolicy,
) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    target = TTFT_FACTOR * alone(1500)
    # Short prompts overload the machine until long after the target of the long one.
    shorts = [(0.03 * number, 100) for number in range(1, int(2 * target / 0.03))]
    long = machine.add(1500, max_tokens=1)
    machine.run(shorts, max_tokens=1)
    assert machine.last_overtaken_by(long, shorts) == pytest.approx(
        target - TTFT_FACTOR * alone(100), abs=0.1
    )


@pytest.mark.parametrize("policy", [PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE])
def test_a_prompt_of_higher_priority_overtakes_those_in_progress(policy: PriorityPolicy) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    normal = machine.add(600)
    machine.step()
    high = machine.add(1000, priority=Priority.HIGH)
    while high.first_token_at is None:
        machine.step()
    assert normal.first_token_at is None
    critical = machine.add(150, priority=Priority.CRITICAL)
    machine.step()
    assert critical.first_token_at is not None


def test_fcfs_ignores_the_priorities_of_prompts() -> None:
    machine = Machine(PriorityPolicy.FCFS, max_prefill_tokens=200, max_chunk_tokens=200)
    first = machine.add(600, priority=Priority.LOW)
    machine.step()
    machine.add(600, priority=Priority.CRITICAL)
    machine.run()
    assert machine.first_token(0) < machine.first_token(1) and first.priority == Priority.LOW


@pytest.mark.parametrize("policy", [PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE])
def test_age_offsets_the_priority_of_a_prompt_in_progress(policy: PriorityPolicy) -> None:
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200, ageing_rate=1.0)
    low = machine.add(600, priority=Priority.LOW)
    machine.step()
    # Each fills a step, and the next arrives before it ends: without ageing the first prompt would wait for all.
    arrivals = [(0.05 * number, 200) for number in range(1, 200)]
    machine.run(arrivals, max_tokens=1, priority=Priority.NORMAL)
    one_level = 1.0
    expected = one_level + TTFT_FACTOR * (alone(600) - alone(200))
    assert machine.last_overtaken_by(low, arrivals) == pytest.approx(expected, abs=0.1)


@ANY_POLICY
def test_a_preempted_prompt_is_ordered_by_its_arrival(policy: PriorityPolicy) -> None:
    machine = Machine(policy)
    order = machine.scheduler._planner._prompts._order
    preempted = machine.add(300)
    machine.clock.advance(30.0)
    preempted.target = 900  # with its generated tokens
    assert order.sort_key(preempted, 0) < order.sort_key(machine.add(20), 0)


def test_cached_tokens_do_not_delay_the_target_of_a_prompt() -> None:
    machine = Machine(max_prefill_tokens=200, max_chunk_tokens=200)
    machine.add(2001, max_tokens=1, family=7)
    machine.run()
    known = machine.add(2400, max_tokens=1, family=7)
    machine.step()
    assert known.cached_tokens == 2000
    arrivals = [(machine.clock() + 0.03 * number, 100) for number in range(200)]
    machine.run(arrivals, max_tokens=1)
    waits = TTFT_FACTOR * (chunk_seconds(2000, 400) - alone(100))
    assert machine.last_overtaken_by(known, arrivals) == pytest.approx(known.arrival + waits, abs=0.1)


@pytest.mark.parametrize("target", [1.5 * BASE, TARGET])
@pytest.mark.parametrize("policy", [PriorityPolicy.FCFS, PriorityPolicy.ADAPTIVE])
def test_the_predicted_seconds_alone_include_the_fixed_seconds_of_all_steps(
    policy: PriorityPolicy, target: float
) -> None:
    machine = Machine(policy, target_inter_token_latency=target, max_chunk_tokens=64)
    prompt = machine.add(2000, max_tokens=1)
    expected = machine.scheduler._planner._size.seconds_alone(0, 2000)
    machine.run()
    assert machine.waited(prompt) == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------------- size


def crowded(**options: Any) -> Machine:
    """Ten sequences decode, and three long prompts are in progress at different positions."""
    machine = Machine(**options)
    for _ in range(10):
        machine.add(100, max_tokens=400)
    while any(s.first_token_at is None for s in machine.scheduler.sequences.values()):
        machine.step()
    for length in (3000, 2000, 1000):
        machine.add(length)
        machine.step()
    return machine


def test_steps_use_the_planned_share_of_the_time_target_to_the_token() -> None:
    machine = crowded()
    planned = 0
    while True:
        plan = machine.step()
        assert plan is not None
        if not plan.num_prefills:
            break
        seconds = machine.seconds(plan)
        assert seconds <= SHARE_OF_TARGET * TARGET * 1.001
        last = plan.prefill_tasks[-1]
        if not last.samples:
            one_more = chunk_seconds(last.start, last.num_tokens + 1) - chunk_seconds(
                last.start, last.num_tokens
            )
            assert seconds + one_more > SHARE_OF_TARGET * TARGET * 0.999, "there was time for another token"
            planned += 1
    assert planned > 20


def test_several_prompts_share_a_step_and_each_counts_with_its_own_position() -> None:
    machine = Machine()
    far = machine.add(3000)
    while far.scheduled < 2500:
        machine.step()
    for _ in range(4):
        machine.add(30)
    plan = machine.step()
    assert plan is not None and plan.num_prefills == 5
    assert machine.seconds(plan) == pytest.approx(SHARE_OF_TARGET * TARGET, rel=0.02)


@pytest.mark.parametrize("start", [0, 1008])
def test_without_time_the_first_prompt_gets_one_block_and_no_other_gets_any(start: int) -> None:
    machine = Machine(target_inter_token_latency=BASE / 2)
    first = machine.add(2000)
    while first.scheduled < start:
        machine.step()
    machine.add(2000)
    for _ in range(3):
        plan = machine.step()
        assert plan is not None
        assert [(task.request_id, task.num_tokens) for task in plan.prefill_tasks] == [("0", BLOCK)]


def test_inter_token_latency_stays_within_the_target_while_prompts_arrive() -> None:
    machine = Machine()
    machine.run([(0.06 * number, (40, 500, 250, 16)[number % 4]) for number in range(64)], max_tokens=60)
    assert 0.8 * TARGET < max(machine.scheduler.tokens.token_gaps) <= SHARE_OF_TARGET * TARGET * 1.001


def test_draft_tokens_stay_within_the_time_target() -> None:
    machine = crowded(max_draft_tokens=64)
    decodes = [s for s in machine.scheduler.running if s.first_token_at is not None]
    room = machine.scheduler._planner._size.room_for_drafts(decodes, 1000)
    longest = max(s.scheduled for s in decodes)
    seconds = BASE + sum(chunk_seconds(s.scheduled, 1) for s in decodes)
    assert seconds + chunk_seconds(longest, room) == pytest.approx(SHARE_OF_TARGET * TARGET, rel=0.01)
    assert machine.scheduler._planner._size.room_for_drafts(decodes, 3) == 3


@ANY_POLICY
def test_a_prompt_that_waits_for_blocks_of_a_long_one_is_not_delayed_by_its_length(
    policy: PriorityPolicy,
) -> None:
    """A prompt of 600 tokens shares the prefix of one of 4,000. Short prompts nearly fill the machine: unless the long one
    inherits the place of the other, all of them would overtake it."""
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    machine.add(4000, max_tokens=1, family=7)
    machine.step()
    sharing = machine.add(600, max_tokens=1, family=7)
    machine.run([(0.046 * number, 110) for number in range(1, 400)], max_tokens=1)
    assert machine.waited(sharing) < 2 * TTFT_FACTOR * alone(600)


@ANY_POLICY
def test_adaptive_orders_prompts_by_their_own_first_token_targets(policy: PriorityPolicy) -> None:
    machine = Machine(policy)
    normal, urgent = machine.add(2000), machine.add(2000, ttft_target=0.1)
    machine.run()
    assert (machine.waited(urgent) < machine.waited(normal)) == (policy is PriorityPolicy.ADAPTIVE)


@ANY_POLICY
def test_cached_tokens_do_not_count_as_work_of_a_waiting_prompt(policy: PriorityPolicy) -> None:
    """The next request of a long conversation waits for long prompts in progress."""
    machine = Machine(policy, max_prefill_tokens=200, max_chunk_tokens=200)
    machine.add(3000, max_tokens=1, family=7)
    machine.run()
    for _ in range(4):
        machine.add(1500, max_tokens=1)
    machine.step()
    next_request = machine.add(3030, max_tokens=1, family=7)
    machine.run()
    assert machine.waited(next_request) < alone(1500)


@ANY_POLICY
def test_every_policy_learns_the_cost_of_steps_with_prompts(policy: PriorityPolicy) -> None:
    """The order of prompts needs that cost under every policy."""
    clock, backend = VirtualClock(), NoopBackend(max_context=4096)
    config = SchedulerConfig(policy=policy, max_running=4, max_chunk_tokens=64)
    info = backend.allocate(KvCachePoolConfig(num_blocks=64, block_size=BLOCK), config.max_running)
    scheduler = ContinuousBatchScheduler(config, info, clock)
    request = InferenceRequest(tuple(range(500)), SamplingParams(max_tokens=1, ignore_eos=True))
    scheduler.add(Sequence(request, seed=0))
    assert not scheduler.cost_model.is_ready
    while (plan := scheduler.schedule()) is not None:
        seconds = PER_TOKEN * sum(plan.counts)
        clock.advance(seconds)
        scheduler.apply(plan, backend.submit(plan).result(), seconds)
    assert scheduler.cost_model.is_ready
    assert scheduler.cost_model.chunk_seconds(0, 100) == pytest.approx(100 * PER_TOKEN, rel=0.05)
