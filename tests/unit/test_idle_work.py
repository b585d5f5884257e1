"""Idle work uses what interactive requests leave (contract 15)."""

from __future__ import annotations

from itertools import count
from typing import Any

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PreemptionMode, PriorityPolicy, SchedulerConfig
from weft.engine.ipc import wire
from weft.plan import IterationPlan
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence
from weft.scheduling.views import slots


class Machine:
    """The scheduler on the noop backend, one step at a time."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        swap_blocks: int = 0,
        extra_rows_are_cheap: bool = False,
        max_running: int = 4,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.seconds_per_token = 1e-5
        self.backend = NoopBackend(max_context=256, extra_rows_are_cheap=extra_rows_are_cheap)
        config = SchedulerConfig(**{"max_running": max_running, **options})
        pool = KvCachePoolConfig(num_blocks=num_blocks, block_size=4, swap_blocks=swap_blocks)
        self.scheduler = ContinuousBatchScheduler(
            config, self.backend.allocate(pool, max_running), self.clock
        )
        self._prompts = count()
        self.tokens: dict[RequestId, list[int]] = {}

    def add(
        self, name: str, *, idle: bool = False, length: int = 4, max_tokens: int = 8, **fields: Any
    ) -> Sequence:
        first = 100 * next(self._prompts)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = InferenceRequest(
            tuple(range(first, first + length)),
            params,
            is_idle_work=idle,
            request_id=RequestId(name),
            **fields,
        )
        sequence = Sequence(request, seed=1)
        self.scheduler.add(sequence)
        return sequence

    def learn(self) -> None:
        """Runs interactive requests of different lengths, which teach the cost model."""
        for index in range(4):
            self.add(f"first-{index}", max_tokens=2, length=4 + index)
        while self.step():
            pass

    def step(self) -> IterationPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.may_plan_ahead = self.scheduler.may_plan_ahead
            seconds = 0.001 + self.seconds_per_token * plan.num_tokens
            self.scheduler.apply(plan, self.backend.submit(plan).result(), seconds)
            for output in self.scheduler.take_outputs()[0]:
                if output.token_id is not None:
                    self.tokens.setdefault(output.request_id, []).append(output.token_id)
        self.scheduler.check_integrity()
        self.clock.advance(0.01)
        return plan

    def planned(self) -> tuple[str, ...]:
        plan = self.step()
        return () if plan is None else plan.request_ids


def test_idle_work_pauses_with_its_memory_and_continues_after_the_last_interactive_token() -> None:
    machine = Machine()
    batch = machine.add("batch", idle=True)
    machine.step()
    machine.add("chat", max_tokens=3)
    held = batch.allocation
    assert [machine.planned() for _ in range(2)] == [("chat",), ("chat",)]
    assert batch.allocation is held and not batch.preemptions
    assert [slot.state for slot in slots(machine.scheduler, 0.0)].count("paused") == 1
    assert [machine.planned() for _ in range(2)] == [("chat",), ("batch",)]
    while machine.step():
        pass
    request = batch.request
    alone = generate_alone(request.prompt, 1, request.params, batch.limit, machine.scheduler.info)
    assert machine.tokens[batch.request_id] == alone


def test_a_paused_request_can_be_cancelled_and_its_deadline_goes_on() -> None:
    machine = Machine()
    machine.add("a", idle=True)
    machine.add("b", idle=True, deadline=0.02)
    machine.step()
    machine.add("chat", max_tokens=20)
    machine.step()
    assert machine.scheduler.cancel(RequestId("a"))
    machine.clock.advance(0.1)
    machine.step()
    assert [s.request_id for s in machine.scheduler.sequences.values()] == ["chat"]


def test_paused_sequences_are_preempted_when_interactive_ones_need_rows_or_blocks() -> None:
    machine = Machine(num_blocks=8, policy=PriorityPolicy.FCFS)
    batch = machine.add("batch", idle=True, length=12)
    machine.step()
    machine.add("chat", length=20, max_tokens=4)
    assert machine.planned() == ("chat",) and batch.preemptions == 1
    rows = Machine()
    idle = [rows.add(f"batch-{index}", idle=True) for index in range(4)]
    rows.step()
    rows.add("chat")
    assert rows.planned() == ("chat",)
    assert [s.preemptions for s in idle] == [0, 0, 0, 1], "only the newest one gives its row"


def test_waiting_idle_work_takes_no_place_in_the_queue_of_interactive_requests() -> None:
    machine = Machine(max_waiting_requests=3)
    for index in range(3):
        machine.add(f"batch-{index}", idle=True, priority=Priority.CRITICAL)
    for index in range(3):
        machine.add(f"chat-{index}", priority=Priority.LOW)
    assert machine.planned() == ("chat-0", "chat-1", "chat-2")


def test_a_preempted_interactive_sequence_gets_the_swap_slots_of_idle_ones() -> None:
    machine = Machine(
        num_blocks=6, swap_blocks=4, preemption=PreemptionMode.SWAP, policy=PriorityPolicy.PRIORITY
    )
    batch = machine.add("batch", idle=True, length=12)
    machine.step()
    low = machine.add("low", length=14, priority=Priority.LOW)
    machine.step()
    assert batch.allocation is not None and batch.allocation.is_swapped
    machine.add("high", length=14, priority=Priority.HIGH)
    machine.step()
    assert low.allocation is not None and low.allocation.is_swapped and batch.allocation is None


def test_cached_blocks_of_idle_work_are_evicted_first() -> None:
    machine = Machine(num_blocks=16)
    chat = machine.add("chat", length=16, max_tokens=1)
    machine.step()
    for index in range(6):
        machine.add(f"batch-{index}", idle=True, length=16, max_tokens=1)
        machine.step()
    again = InferenceRequest(chat.request.prompt, SamplingParams(max_tokens=1), request_id=RequestId("again"))
    sequence = Sequence(again, 1)
    machine.scheduler.add(sequence)
    machine.step()
    assert sequence.cached_tokens == 12


def test_where_rows_are_cheap_idle_decodes_share_steps_with_interactive_ones() -> None:
    machine = Machine(extra_rows_are_cheap=True, policy=PriorityPolicy.ADAPTIVE)
    machine.learn()
    machine.add("batch", idle=True, max_tokens=40)
    machine.step()
    machine.add("chat", max_tokens=20, length=8)
    assert machine.planned() == ("chat",), "a step with an interactive prompt has no idle work"
    assert machine.planned() == ("chat", "batch")
    machine.add("other", length=8)
    assert "batch" not in machine.planned()


def test_for_a_minute_after_an_interactive_request_steps_of_idle_work_are_short_and_not_planned_ahead() -> (
    None
):
    machine = Machine(num_blocks=200, policy=PriorityPolicy.ADAPTIVE)
    machine.seconds_per_token = 1e-4
    machine.learn()
    soon = machine.add("soon", idle=True, length=200)
    sizes = []
    while soon.finish_reason is None:
        plan = machine.step()
        assert plan is not None and not machine.may_plan_ahead
        sizes.append(plan.num_tokens)
    assert 16 <= max(sizes) <= 44, "five milliseconds are 40 tokens"
    machine.clock.advance(60)
    machine.add("later", idle=True, length=200)
    plan = machine.step()
    assert plan is not None and plan.num_tokens == 200 and machine.may_plan_ahead


def test_the_minute_of_short_steps_begins_when_the_interactive_request_ends() -> None:
    machine = Machine(num_blocks=200, policy=PriorityPolicy.ADAPTIVE)
    machine.seconds_per_token = 1e-4
    machine.learn()
    chat = machine.add("chat", max_tokens=20)
    machine.add("batch", idle=True, length=200)
    while chat.finish_reason is None:
        machine.clock.advance(10)
        machine.step()
    plan = machine.step()
    assert plan is not None and plan.request_ids == ("batch",) and plan.num_tokens <= 44


def test_short_steps_admit_as_many_lines_as_decode_in_their_time() -> None:
    machine = Machine(num_blocks=200, max_running=12, policy=PriorityPolicy.ADAPTIVE)
    machine.seconds_per_token = 2e-3
    machine.learn()
    for index in range(10):
        machine.add(f"batch-{index}", idle=True, max_tokens=60)
    for _ in range(20):
        machine.step()
    assert 2 <= len(machine.scheduler.running) <= 4, "three decodes of one row are four decodes at once"
    machine.clock.advance(60)
    for _ in range(20):
        machine.step()
    assert len(machine.scheduler.running) == 10


def test_idle_work_is_sent_to_the_process_of_the_engine() -> None:
    request = InferenceRequest((1, 2), is_idle_work=True, request_id=RequestId("x"))
    message = wire.to_engine.decode(wire.encode(wire.Submit.of((0,), request)))
    assert isinstance(message, wire.Submit) and message.whole_request.is_idle_work
