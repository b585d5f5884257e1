"""Compares the queue with a sorted list under every policy, and ageing with its definition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.config import PriorityPolicy, SchedulerConfig
from weft.errors import QueueFullError
from weft.request import InferenceRequest, Priority, RequestId, RequestState, SamplingParams
from weft.scheduling.policy import DEFAULT_TTFT_TARGET, OVERTAKING_FACTOR, AdmissionPolicy
from weft.scheduling.queue import RequestQueue
from weft.scheduling.sequence import Sequence


def make_sequence(
    order: int,
    arrival: float,
    *,
    length: int = 1,
    max_tokens: int = 1,
    priority: Priority = Priority.NORMAL,
    target: float | None = None,
    preempted: bool = False,
) -> Sequence:
    request = InferenceRequest(
        tuple([1] * length), SamplingParams(max_tokens=max_tokens), priority=priority, ttft_target=target
    )
    sequence = Sequence(request.replaced(request_id=RequestId(str(order))), 0)
    sequence.order, sequence.arrival = order, arrival
    if preempted:
        sequence.state = RequestState.PREEMPTED
    return sequence


def rank(sequence: Sequence, config: SchedulerConfig) -> tuple[Any, ...]:
    """The definition of the order. Times and rates in the tests are exact binary fractions."""
    preempted = sequence.state is RequestState.PREEMPTED
    if config.policy is PriorityPolicy.FCFS:
        return (sequence.order,)
    if config.policy is PriorityPolicy.SHORTEST_JOB_FIRST:
        if preempted:
            return (0, sequence.order)
        return (1, sequence.arrival + OVERTAKING_FACTOR * sequence.cost, sequence.limit, sequence.order)
    if sequence.priority == Priority.CRITICAL:
        return (0, 0, 0, sequence.order)
    since = sequence.arrival
    if config.policy is PriorityPolicy.ADAPTIVE and not preempted:
        target = sequence.request.ttft_target
        since += DEFAULT_TTFT_TARGET + OVERTAKING_FACTOR * sequence.cost if target is None else target
    if config.ageing_rate == 0:
        return (1, -sequence.priority, since, sequence.order)
    return (1, -(sequence.priority - config.ageing_rate * since), 0, sequence.order)


class QueueMachine(RuleBasedStateMachine):
    """Model: a list of waiting sequences, sorted on demand. Promoted ones come first, but after CRITICAL ones under
    policies with priorities."""

    @initialize(
        policy=st.sampled_from(PriorityPolicy),
        rate=st.sampled_from([0.0, 0.125, 2.0]),
        max_requests=st.integers(1, 6),
        max_tokens=st.integers(1, 20),
    )
    def start(self, policy: PriorityPolicy, rate: float, max_requests: int, max_tokens: int) -> None:
        self.config = SchedulerConfig(
            policy=policy, ageing_rate=rate, max_waiting_requests=max_requests, max_waiting_tokens=max_tokens
        )
        self.queue = RequestQueue(self.config, AdmissionPolicy(self.config))
        self.waiting: list[Sequence] = []
        self.promoted: set[int] = set()
        self.aside: list[tuple[Sequence, object]] = []
        self.outside: list[Sequence] = []
        self.next_order = 0
        self.now = 0.0

    def sorted_model(self) -> list[Sequence]:
        return sorted(self.waiting, key=self.model_key)

    def model_key(self, sequence: Sequence) -> tuple[float, ...]:
        ranks = self.config.policy in (PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE)
        is_critical = ranks and sequence.priority == Priority.CRITICAL
        if sequence.order in self.promoted:
            return (0 if is_critical or not ranks else 2, sequence.order)
        return (1 if is_critical else 3, *rank(sequence, self.config))

    @rule(
        length=st.integers(1, 6),
        max_tokens=st.integers(1, 6),
        priority=st.sampled_from(Priority),
        ttft=st.sampled_from([None, 0.0, 0.5, 60.0]),
        wait=st.sampled_from([0.0, 0.25, 3.0]),
        cost=st.sampled_from([0.0, 0.5, 2.0]),
        is_preempted=st.booleans(),
    )
    def push(
        self,
        length: int,
        max_tokens: int,
        priority: Priority,
        ttft: float | None,
        wait: float,
        cost: float,
        is_preempted: bool,
    ) -> None:
        self.now += wait
        sequence = make_sequence(
            self.next_order,
            self.now,
            length=length,
            max_tokens=max_tokens,
            priority=priority,
            target=ttft,
            preempted=is_preempted,
        )
        sequence.cost = cost
        self.next_order += 1
        if not is_preempted:
            too_many = len(self.waiting) >= self.config.max_waiting_requests
            tokens = sum(len(s.tokens) for s in self.waiting) + length
            if too_many or (self.waiting and tokens > self.config.max_waiting_tokens):
                number = len(self.waiting) if too_many else length
                with pytest.raises(QueueFullError, match=rf"\b{number}\b"):
                    self.queue.check_room(length)
                return
            self.queue.check_room(length)
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.outside)
    @rule(which=st.integers(0, 99))
    def push_again_as_preempted(self, which: int) -> None:
        sequence = self.outside.pop(which % len(self.outside))
        sequence.state = RequestState.PREEMPTED
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        sequence = self.waiting.pop(which % len(self.waiting))
        self.queue.remove(sequence)
        self.promoted.discard(sequence.order)
        self.outside.append(sequence)
        with pytest.raises(ValueError, match=f"request {sequence.request_id} is not waiting"):
            self.queue.remove(sequence)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def push_twice(self, which: int) -> None:
        sequence = self.waiting[which % len(self.waiting)]
        with pytest.raises(ValueError, match="waiting already"):
            self.queue.push(sequence)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def promote(self, which: int) -> None:
        sequence = self.waiting[which % len(self.waiting)]
        self.queue.promote(sequence)
        self.promoted.add(sequence.order)

    @precondition(lambda self: self.waiting)
    @rule()
    def set_aside(self) -> None:
        first = self.sorted_model()[0]
        assert self.queue.peek() is first
        self.aside.append((first, self.queue.set_aside()))
        self.waiting.remove(first)

    @precondition(lambda self: self.aside)
    @rule()
    def put_back(self) -> None:
        for sequence, item in self.aside:
            self.queue.put_back(item)
            self.waiting.append(sequence)
        self.aside.clear()

    @rule()
    def peek(self) -> None:
        model = self.sorted_model()
        assert self.queue.peek() is (model[0] if model else None)

    @invariant()
    def counts_equal_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        assert self.queue.waiting_tokens == sum(len(s.tokens) for s in self.waiting)
        assert {s.order for s in self.queue} == {s.order for s in self.waiting}

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        model = self.sorted_model()
        drained = []
        while (sequence := self.queue.peek()) is not None:
            drained.append(sequence)
            self.queue.remove(sequence)
        assert [s.order for s in drained] == [s.order for s in model]
        assert len(self.queue) == self.queue.waiting_tokens == 0


QueueMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestQueueEqualsASortedListUnderEveryPolicy = QueueMachine.TestCase


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 1000), st.sampled_from(Priority)), min_size=2, max_size=12),
    rate=st.floats(0.001, 10),
    later=st.floats(0, 10_000),
)
def test_ageing_orders_requests_by_their_aged_priorities_at_any_time(
    arrivals: list[tuple[float, Priority]], rate: float, later: float
) -> None:
    config = SchedulerConfig(policy=PriorityPolicy.PRIORITY, ageing_rate=rate)
    queue = RequestQueue(config, AdmissionPolicy(config))
    for order, (arrival, priority) in enumerate(sorted(arrivals, key=lambda pair: pair[0])):
        queue.push(make_sequence(order, arrival, priority=priority))
    now = max(arrival for arrival, _ in arrivals) + later
    served = []
    while (sequence := queue.peek()) is not None:
        served.append(sequence)
        queue.remove(sequence)

    def aged(sequence: Sequence) -> float:
        return sequence.priority + rate * (now - sequence.arrival)

    for position, first in enumerate(served):
        for second in served[position + 1 :]:
            if Priority.CRITICAL in (first.priority, second.priority):
                # Age never overtakes a CRITICAL request.
                assert first.priority == Priority.CRITICAL
                if first.priority == second.priority:
                    assert first.order < second.order
            else:
                assert aged(first) >= aged(second) - 1e-9 * (1 + abs(aged(second)))


def test_removing_most_of_a_long_queue_keeps_the_order_of_the_rest() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    queue = RequestQueue(config, AdmissionPolicy(config))
    sequences = [make_sequence(order, 0.0, max_tokens=1 + order * 37 % 101) for order in range(500)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences:
        if sequence.order % 50:
            queue.remove(sequence)
    queue.check_integrity()
    left = []
    while (first := queue.peek()) is not None:
        left.append(first)
        queue.remove(first)
    assert left == sorted((s for s in sequences if s.order % 50 == 0), key=lambda s: (s.limit, s.order))


def test_set_aside_takes_the_first_sequence_that_still_waits() -> None:
    config = SchedulerConfig()
    queue = RequestQueue(config, AdmissionPolicy(config))
    gone, stays = make_sequence(0, 0.0), make_sequence(1, 0.0)
    queue.push(gone)
    queue.push(stays)
    queue.remove(gone)
    item = queue.set_aside()
    assert len(queue) == 0 and queue.peek() is None
    queue.put_back(item)
    assert queue.peek() is stays


def test_an_empty_queue_accepts_a_request_above_its_token_limit() -> None:
    config = SchedulerConfig(max_waiting_tokens=4)
    queue = RequestQueue(config, AdmissionPolicy(config))
    queue.check_room(9)
    queue.push(make_sequence(0, 0.0, length=9))
    with pytest.raises(QueueFullError, match="9 tokens are waiting and this request has 1"):
        queue.check_room(1)
