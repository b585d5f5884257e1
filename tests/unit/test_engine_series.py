"""Each series of the engine in `/metrics` moves when its fact happens, and only then."""

from __future__ import annotations

from itertools import count
from operator import attrgetter
from typing import Any

from weft.backends.base import StepHandle
from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import (
    KvCacheKind,
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.metrics import ENGINE_SERIES, Buckets
from weft.plan import IterationPlan
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams

BLOCK_SIZE = 4


class TimedBackend(NoopBackend):
    """Every step takes 20 ms of the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(max_context=256, extra_rows_are_cheap=False)
        self._clock = clock

    def submit(self, plan: IterationPlan) -> StepHandle:
        handle = super().submit(plan)
        self._clock.advance(0.02)
        return handle


class Machine:
    """An engine, one iteration at a time."""

    def __init__(self, num_blocks: int = 64, swap_blocks: int = 0, two_tier: bool = False, **scheduler: Any):
        self.clock = VirtualClock()
        self.backend = TimedBackend(self.clock)
        tiers: dict[str, Any] = (
            {"kv_cache": KvCacheKind.TWO_TIER, "tail_length": 8, "store_blocks": 64} if two_tier else {}
        )
        config = ServingEngineConfig(
            SchedulerConfig(**{"max_running": 4, **scheduler}),
            KvCachePoolConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, swap_blocks=swap_blocks, **tiers),
            overlap=False,
        )
        self.engine = ServingEngine(self.backend, config, clock=self.clock, seed=1)
        self._prompts = count()

    def add(
        self, name: str, length: int = 4, max_tokens: int = 8, first: int | None = None, **more: Any
    ) -> None:
        first = 100 * next(self._prompts) if first is None else first
        self.engine.submit(
            InferenceRequest(
                tuple(range(first, first + length)),
                SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                request_id=RequestId(name),
                **more,
            )
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.run_iteration()

    def finish(self) -> None:
        while self.engine.scheduler.has_work:
            self.step()

    def series(self) -> dict[str, float]:
        """Name and values of labels -> the value of the series; of a histogram, its count."""
        figures = self.engine.metrics()
        found: dict[str, float] = {}
        for one in ENGINE_SERIES:
            if one.is_two_tier and figures.two_tier is None:
                continue
            value = attrgetter(one.figure)(figures)
            name = "/".join([one.name, *(value for _, value in one.labels)])
            assert name not in found
            found[name] = sum(value.counts) if isinstance(value, Buckets) else value
        return found

    def moved(self, *names: str) -> dict[str, float]:
        """The series that begin with one of the names and are not 0."""
        return {
            name: value for name, value in self.series().items() if value and name.startswith(tuple(names))
        }


def test_a_series_has_the_same_help_kind_and_label_names_as_others_of_its_name() -> None:
    known: dict[str, Any] = {}
    for one in ENGINE_SERIES:
        shape = (one.kind, one.help, tuple(name for name, _ in one.labels))
        assert known.setdefault(one.name, shape) == shape


def test_steps_are_timed_by_kind() -> None:
    machine = Machine()
    machine.add("a", length=20, max_tokens=5)
    machine.step()
    assert machine.moved("step_seconds") == {"step_seconds/prefill": 1}
    machine.step(2)
    assert machine.moved("step_seconds") == {"step_seconds/prefill": 1, "step_seconds/decode": 2}
    machine.add("b", length=20, max_tokens=1)
    machine.step()
    kinds = {"step_seconds/prefill": 1, "step_seconds/decode": 2, "step_seconds/mixed": 1}
    assert machine.moved("step_seconds") == kinds
    seconds = machine.engine.metrics().step_seconds
    for of_kind in (seconds.prefill, seconds.mixed):
        assert abs(of_kind.total - 0.02) < 1e-9
        assert of_kind.counts[of_kind.bounds.index(0.02)] + of_kind.counts[of_kind.bounds.index(0.03)] == 1


def test_sequences_and_tokens_of_steps_are_counted() -> None:
    machine = Machine()
    machine.add("a", length=10, max_tokens=3)
    machine.add("b", length=6, max_tokens=3)
    machine.finish()
    found = machine.series()
    # One step for both prompts, then two steps in which both decode.
    assert (found["steps"], found["step_sequences"], found["step_tokens"]) == (3, 6, 16 + 4)
    assert found["batch_usage_perc"] == 0


def test_the_batch_is_full_when_all_rows_are_in_use() -> None:
    machine = Machine(max_running=4)
    for name in "abc":
        machine.add(name, max_tokens=20)
    machine.step(2)
    assert machine.series()["batch_usage_perc"] == 3 / 4


def test_blocks_are_free_then_used_then_cached() -> None:
    machine = Machine(num_blocks=16)
    assert machine.moved("kv_cache_blocks") == {"kv_cache_blocks/full/free": 16}
    machine.add("a", length=8, max_tokens=2)
    machine.step()
    assert machine.series()["kv_cache_blocks/full/used"] >= 2
    machine.finish()
    assert machine.moved("kv_cache_blocks") == {
        "kv_cache_blocks/full/free": 14,
        "kv_cache_blocks/full/cached": 2,
    }


def test_blocks_of_sessions_are_hot_and_those_of_idle_work_are_idle() -> None:
    machine = Machine(num_blocks=16)
    machine.add("a", length=8, max_tokens=2, session_id="one")
    machine.add("b", length=8, max_tokens=2, is_idle_work=True)
    machine.finish()
    states = machine.moved("kv_cache_blocks")
    assert states == {
        f"kv_cache_blocks/full/{state}": n for state, n in (("free", 12), ("hot", 2), ("idle", 2))
    }


def test_evictions_are_counted_by_the_state_of_the_block_before() -> None:
    machine = Machine(num_blocks=6)
    machine.add("idle", length=8, max_tokens=2, is_idle_work=True)
    machine.finish()
    machine.add("plain", length=8, max_tokens=2)
    machine.finish()
    assert machine.moved("kv_cache_evictions") == {}
    machine.add("session", length=12, max_tokens=2, session_id="one")  # of 6 blocks, 2 are free
    machine.finish()
    assert machine.moved("kv_cache_evictions") == {"kv_cache_evictions/full/idle": 2}
    machine.add("all", length=20, max_tokens=2)
    machine.finish()
    assert machine.moved("kv_cache_evictions") == {
        "kv_cache_evictions/full/idle": 2,
        "kv_cache_evictions/full/cached": 2,
        "kv_cache_evictions/full/hot": 3,
    }


def test_both_tiers_show_their_blocks_and_only_a_two_tier_cache_shows_a_store() -> None:
    assert not [name for name in Machine().series() if "/store/" in name]
    machine = Machine(num_blocks=32, two_tier=True)
    machine.add("a", length=40, max_tokens=20)
    machine.step(2)
    states = machine.moved("kv_cache_blocks")
    assert states["kv_cache_blocks/store/used"] > 0 and states["kv_cache_blocks/full/used"] > 0
    store = machine.engine.scheduler.kv_cache.store.num_blocks
    assert sum(n for name, n in states.items() if "/store/" in name) == store
    machine.finish()
    states = machine.moved("kv_cache_blocks")
    assert "kv_cache_blocks/store/used" not in states and states["kv_cache_blocks/store/cached"] > 0


def test_a_running_sequence_that_needs_blocks_preempts_for_memory() -> None:
    machine = Machine(num_blocks=8, preemption=PreemptionMode.RECOMPUTE)
    for name in "ab":
        machine.add(name, length=8, max_tokens=16)
    machine.finish()
    found = machine.moved("num_preemptions", "swap_bytes")
    assert found.keys() == {"num_preemptions/memory"}


def test_a_waiting_sequence_of_higher_priority_preempts_for_priority() -> None:
    machine = Machine(max_running=1, policy=PriorityPolicy.PRIORITY)
    machine.add("low", max_tokens=16, priority=Priority.LOW)
    machine.step(2)
    machine.add("high", max_tokens=2, priority=Priority.HIGH)
    machine.finish()
    assert machine.moved("num_preemptions") == {"num_preemptions/priority": 1}


def test_idle_work_is_preempted_for_interactive_sequences() -> None:
    machine = Machine(num_blocks=8, preemption=PreemptionMode.RECOMPUTE)
    machine.add("idle", length=16, max_tokens=8, is_idle_work=True)
    machine.step(2)
    machine.add("chat", length=16, max_tokens=4)
    machine.finish()
    assert machine.moved("num_preemptions") == {"num_preemptions/interactive": 1}


def test_bytes_and_slots_of_swaps_are_counted() -> None:
    machine = Machine(num_blocks=8, swap_blocks=8, max_running=1, policy=PriorityPolicy.PRIORITY,
                      preemption=PreemptionMode.SWAP)  # fmt: skip
    machine.add("low", length=8, max_tokens=8, priority=Priority.LOW)
    machine.step(2)
    assert machine.moved("kv_cache_swap_slots", "swap_bytes") == {"kv_cache_swap_slots/free": 8}
    machine.add("high", length=8, max_tokens=4, priority=Priority.HIGH)
    machine.step(2)
    block_bytes = machine.engine.scheduler.info.bytes_per_block
    used = machine.series()["kv_cache_swap_slots/used"]
    assert used > 0 and machine.series()["kv_cache_swap_slots/free"] == 8 - used
    assert machine.moved("swap_bytes") == {"swap_bytes/out": used * block_bytes}
    machine.finish()
    found = machine.series()
    assert found["swap_bytes/in"] == found["swap_bytes/out"] == used * block_bytes
    assert found["kv_cache_swap_slots/used"] == 0 and found["swaps_failed"] == 0
    assert found["num_preemptions_by_swap"] == found["num_preemptions/priority"] == 1


def test_a_missed_target_of_a_first_token_is_counted() -> None:
    machine = Machine()
    machine.add("in-time", max_tokens=2, ttft_target=10.0)
    machine.add("late", max_tokens=2, ttft_target=0.001)
    machine.finish()
    assert machine.series()["ttft_targets_missed"] == 1


def test_a_snapshot_does_not_change_when_the_engine_runs_on() -> None:
    machine = Machine(num_blocks=6)
    before = machine.engine.metrics()
    for _ in range(4):
        machine.add(f"{machine.clock()}", length=16, max_tokens=4)
        machine.finish()
    assert before.totals.steps == sum(before.step_seconds.prefill.counts) == before.evictions.cached == 0
    assert machine.engine.metrics().evictions.cached > 0
