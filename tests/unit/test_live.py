"""Frames of the live page agree with the scheduler, miss nothing, and change no plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.live_recorder import LAPSE_SECONDS, LiveRecorder
from weft.engine.replay import describe, replay
from weft.engine.serving import ServingEngine
from weft.live import BLOCK_STATES, FINISH_REASONS, MAX_EVENTS, MAX_REQUESTS, MAX_STEPS, LiveFrame
from weft.request import FinishReason, InferenceRequest, RequestId, SamplingParams
from weft.scheduling.cache.block_pool import BlockPool
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.simulation.run import Simulation
from weft.simulation.scenario import draw

SEEDS = range(300, 420)


def _engine(clock: VirtualClock, num_blocks: int = 64, **scheduler: Any) -> ServingEngine:
    config = ServingEngineConfig(
        SchedulerConfig(**{"max_running": 8, **scheduler}), KvCachePoolConfig(num_blocks, 4)
    )
    return ServingEngine(NoopBackend(), config, clock=clock, seed=1)


def _request(name: str, length: int = 6, max_tokens: int = 4, **fields: Any) -> InferenceRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return InferenceRequest(tuple(range(3, 3 + length)), params, request_id=RequestId(name), **fields)


def _watched(seed: int) -> tuple[Simulation, list[LiveFrame]]:
    """Runs a scenario with a frame after every iteration. Each frame has all blocks."""
    simulation = Simulation(draw(seed))
    engine = simulation.engine
    engine._live = LiveRecorder(engine.scheduler, engine._metrics, lapse=1e9)
    frames = [engine.live_frame()]
    run_iteration = engine.run_iteration

    def run_and_look() -> Any:
        outputs = run_iteration()
        frames.append(engine.live_frame())
        _check_blocks(frames[-1], engine.scheduler)
        _check_requests(frames[-1], engine.scheduler)
        return outputs

    engine.run_iteration = run_and_look  # type: ignore[method-assign]
    simulation.run()
    return simulation, frames


def _true_states(pool: BlockPool) -> dict[int, str]:
    """The states by the lists that own the blocks."""
    states = {block: "u" if count == 1 else "s" for block, count in enumerate(pool.reference_counts) if count}
    for letter, owner in (
        ("f", pool._free),
        ("c", pool._evictable),
        ("h", pool._evictable_hot),
        ("i", pool._evictable_idle),
    ):
        states |= dict.fromkeys(owner, letter)
    return states


def _check_blocks(frame: LiveFrame, scheduler: ContinuousBatchScheduler) -> None:
    kv_cache = scheduler.kv_cache
    full = _true_states(kv_cache.pool)
    stored = {block: letter.upper() for block, letter in _true_states(kv_cache.store).items()}
    assert dict(enumerate(frame.blocks)) == full | stored
    counts = Counter(frame.blocks)
    assert counts["u"] + counts["s"] == frame.blocks_used
    assert counts["U"] + counts["S"] == frame.store_blocks_used
    swap_slots = sum(len(a.swap_slots) for a in kv_cache._allocations.values())
    assert frame.swap_blocks_used == swap_slots


def _check_requests(frame: LiveFrame, scheduler: ContinuousBatchScheduler) -> None:
    assert {one.request_id for one in frame.requests} == scheduler.sequences.keys()
    assert frame.num_running + frame.num_waiting == len(frame.requests)
    for one in frame.requests:
        sequence = scheduler.sequences[one.request_id]
        holds_row = sequence.allocation is not None and sequence.allocation.row is not None
        assert (one.row >= 0) is holds_row
        if one.state in ("prefilling", "decoding"):
            assert sequence in scheduler.running
        elif one.state == "paused":
            assert sequence in scheduler.paused
        elif one.state == "swapped":
            assert scheduler.kv_cache.is_swapped(one.request_id) or sequence in scheduler.resuming
        else:
            assert one.state in ("waiting", "preempted") and not holds_row
        assert one.computed == sequence.computed and one.num_tokens == len(sequence.tokens)
        if one.row >= 0:
            assert one.admitted_at is not None and one.arrived_at <= one.admitted_at <= frame.at


def test_blocks_requests_and_events_of_frames_agree_with_the_scheduler_in_every_scenario() -> None:
    kinds: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for seed in SEEDS:
        simulation, frames = _watched(seed)
        for frame in frames:
            states.update(frame.blocks)
            states.update(one.state for one in frame.requests)
            assert frame.steps_left_out == frame.events_left_out == 0
        events = [event for frame in frames for event in frame.events]
        kinds.update(event.kind for event in events)
        of_request: dict[RequestId, Counter[str]] = {}
        for event in events:
            of_request.setdefault(event.request_id, Counter())[event.kind] += 1
        assert of_request.keys() == simulation.sequences.keys(), f"scenario {seed}"
        swaps = Counter(e.request_id for e in events if e.kind == "preempted" and e.first)
        ends = {e.request_id: e for e in events if e.kind in ("finished", "failed")}
        for request_id, sequence in simulation.sequences.items():
            found = of_request[request_id]
            result = simulation.engine.get_result(request_id)
            assert result is not None
            assert found["queued"] == 1 and found["finished"] + found["failed"] == 1
            assert found["preempted"] == sequence.preemptions
            assert found["swapped_in"] <= swaps[request_id]
            assert found["first_token"] == (result.time_to_first_token is not None)
            assert bool(found["admitted"]) is (sequence.admitted_at is not None)
            end = ends[request_id]
            assert (end.kind == "failed") is (sequence.finish_reason is FinishReason.ERROR)
            assert end.kind == "failed" or FINISH_REASONS[end.first] is sequence.finish_reason
        steps = [step for frame in frames for step in frame.steps]
        stats = simulation.engine.scheduler.stats
        assert len(steps) == stats.steps == frames[-1].totals["steps"]
        assert sum(step.num_drafts for step in steps) == stats.tokens_drafted
        computed = sum(step.num_decodes + step.num_drafts + step.prefill_tokens for step in steps)
        assert computed == stats.tokens_computed == frames[-1].totals["tokens_computed"]
    for kind in ("chunk", "preempted", "swapped_in", "failed"):
        assert kinds[kind], f"the scenarios have no event {kind}"
    for letter in (*BLOCK_STATES, *"FUSC", "paused", "swapped", "preempted", "waiting"):
        assert states[letter], f"the scenarios never show {letter}"


def test_a_scheduler_that_is_recorded_makes_the_same_plans() -> None:
    for seed in SEEDS[:60]:
        plans = []
        for is_recorded in (False, True):
            simulation = Simulation(draw(seed))
            engine = simulation.engine
            made: list[Any] = []
            schedule = engine.scheduler.schedule

            def keep(schedule: Any = schedule, made: list[Any] = made) -> Any:
                plan = schedule()
                made.append(None if plan is None else describe(plan))
                return plan

            engine.scheduler.schedule = keep  # type: ignore[method-assign]
            if is_recorded:
                take = engine.run_iteration
                engine.run_iteration = lambda engine=engine, take=take: (engine.live_frame(), take())[1]  # type: ignore
            made.append(simulation.run())
            plans.append(made)
        assert plans[0] == plans[1], f"scenario {seed}"


def test_a_run_that_is_recorded_can_be_replayed_from_its_log(tmp_path: Path) -> None:
    """A log has the readings of the clock. So recording must not read the clock."""
    for seed in SEEDS[:20]:
        path = tmp_path / str(seed)
        simulation = Simulation(draw(seed), str(path))
        engine = simulation.engine
        take = engine.run_iteration
        engine.run_iteration = lambda engine=engine, take=take: (engine.live_frame(), take())[1]  # type: ignore
        simulation.run()
        engine.stop()
        assert replay(str(path)).steps >= engine.scheduler.stats.steps


def test_without_frames_nothing_is_recorded() -> None:
    clock = VirtualClock()
    engine = _engine(clock)
    engine.submit(_request("early"))
    engine.run_until_idle()
    assert engine.live_frame().events == ()
    clock.advance(LAPSE_SECONDS)
    engine.submit(_request("late"))
    engine.run_until_idle()
    history = engine.scheduler.history
    assert not history.take_steps() and history.take_events() == ((), 0)


def test_a_frame_after_a_pause_has_nothing_from_before_it() -> None:
    clock = VirtualClock()
    engine = _engine(clock)
    engine.live_frame()
    engine.submit(_request("early"))
    clock.advance(2 * LAPSE_SECONDS)
    engine.run_until_idle()
    frame = engine.live_frame()
    assert (frame.steps, frame.events, frame.steps_left_out, frame.events_left_out) == ((), (), 0, 0)
    assert frame.totals["steps"] == engine.scheduler.stats.steps > 0


def test_a_frame_has_the_newest_steps_and_events_and_says_how_many_it_leaves_out() -> None:
    engine = _engine(VirtualClock(), 512)
    engine.live_frame()
    for number in range(300):
        engine.submit(_request(f"r{number}", max_tokens=2))
    engine.run_until_idle()
    stats = engine.scheduler.stats
    frame = engine.live_frame()
    assert len(frame.steps) == MAX_STEPS and frame.steps_left_out == stats.steps - MAX_STEPS > 0
    assert frame.steps[-1].step == frame.step
    # Each of the 300 requests is queued, admitted, computed in one chunk, and has a first token and an end.
    assert len(frame.events) == MAX_EVENTS and frame.events_left_out == 5 * 300 - MAX_EVENTS
    assert frame.events[-1].kind == "finished"
    after = engine.live_frame()
    assert not after.steps and not after.events and not after.steps_left_out and not after.events_left_out


def test_a_large_cache_is_shown_by_several_frames() -> None:
    engine = _engine(VirtualClock(), 25)
    recorder = LiveRecorder(engine.scheduler, engine._metrics, blocks_per_frame=10)
    frames = [recorder.frame(0.0) for _ in range(4)]
    assert [(frame.first_block, len(frame.blocks)) for frame in frames] == [
        (0, 10),
        (10, 10),
        (20, 5),
        (0, 10),
    ]


def test_a_frame_has_the_running_requests_by_row_then_the_queue_in_order() -> None:
    engine = _engine(VirtualClock(), max_running=2, policy=PriorityPolicy.FCFS)
    for name in "abcd":
        engine.submit(_request(name, max_tokens=20))
    engine.run_iteration()
    engine.run_iteration()
    requests = engine.live_frame().requests
    assert [(one.request_id, one.row, one.state) for one in requests] == [
        ("a", 0, "decoding"),
        ("b", 1, "decoding"),
        ("c", -1, "waiting"),
        ("d", -1, "waiting"),
    ]


def test_a_frame_has_a_bounded_number_of_requests() -> None:
    engine = _engine(VirtualClock(), max_running=2, max_waiting_requests=2000)
    for number in range(1000):
        engine.submit(_request(f"r{number}"))
    engine.run_iteration()
    frame = engine.live_frame()
    assert len(frame.requests) == MAX_REQUESTS
    assert [one.request_id for one in frame.requests[:4]] == ["r0", "r1", "r2", "r3"]
    assert (frame.num_running, frame.num_waiting) == (2, 998)


@pytest.mark.parametrize("policy", [PriorityPolicy.ADAPTIVE, PriorityPolicy.FCFS])
def test_the_target_of_a_step_is_known_only_to_the_policy_that_has_one(policy: PriorityPolicy) -> None:
    engine = _engine(VirtualClock(), policy=policy, target_inter_token_latency=0.25)
    expected = 0.25 if policy is PriorityPolicy.ADAPTIVE else None
    assert engine.live_info().step_target == expected


def test_a_first_token_counts_while_its_request_runs_and_only_once() -> None:
    engine = _engine(VirtualClock(), policy=PriorityPolicy.FCFS)
    engine.submit(_request("one", max_tokens=50))
    for _ in range(5):
        engine.run_iteration()
    frame = engine.live_frame()
    assert sum(frame.first_token_counts.values()) == 1
    (one,) = frame.requests
    assert one.num_tokens < one.limit, "the request runs"
    engine.run_until_idle()
    frame = engine.live_frame()
    assert sum(frame.first_token_counts.values()) == 1
    assert sum(frame.gap_counts.values()) == 49
