"""Replicas on the virtual clock: the real scheduler, exact windows, hits, limits, and the same result for any number of
processes."""

from __future__ import annotations

import dataclasses
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.backends.cost_model import CostModelBackend, StepCosts
from weft.bench.report import quantile
from weft.clock import VirtualClock
from weft.config import KvCacheKind, KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.planning.costs import MeasuredCosts
from weft.planning.description import Description, LengthRange, described
from weft.planning.load import Load, LoadSummary
from weft.planning.measure import profile_of_log, profile_of_server, read_steps
from weft.planning.outcome import FineHistogram, Outcome
from weft.planning.profile import KvRoom, MachineProfile, read_profile
from weft.planning.replica import PlannedRequest, Replica, ReplicaSettings, Targets
from weft.planning.search import PlanSettings, first_guess, make_plan
from weft.planning.traces import read_trace, unique_segment
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams
from weft.routing import key_of
from weft.scheduling.policy import StepCostModel
from weft.server.settings import ServerSettings

ADAPTIVE = ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE))
COSTS = MeasuredCosts(0.002, ((0, 0.0), (8, 0.002), (4096, 0.8)), 1e-5, 7e-7, 1e-7, 7e-7)
NOISY = dataclasses.replace(COSTS, noise=((0.0, (0.8, 0.9, 1.0, 1.1, 1.2)),))
CONTEXT = 4096


def profile(
    costs: MeasuredCosts = NOISY, blocks: int = 2048, request_seconds: float = 0.003
) -> MachineProfile:
    room = KvRoom(16, blocks, 1000, 0, CONTEXT)
    return MachineProfile("machine", "model", "test", room, costs, request_seconds=request_seconds)


def settings(**fields: Any) -> ReplicaSettings:
    return ReplicaSettings(fields.pop("profile", profile()), fields.pop("config", ADAPTIVE), **fields)


def load(count: int = 150, rate: float = 12.0, **fields: Any) -> list[PlannedRequest]:
    lengths = {"prompt": LengthRange(16, 400), "answer": LengthRange(8, 80), **fields}
    return list(described(Description(rate, count, **lengths), context=CONTEXT))


def figures(outcome: Outcome) -> list[Any]:
    """All that an outcome holds, for comparisons."""
    return [
        (one.counts, one.total, one.largest) if isinstance(one, FineHistogram) else one
        for one in vars(outcome).values()
    ]


def run_alone(requests: Sequence[PlannedRequest], step: float | None = None, **fields: Any) -> Outcome:
    """Runs a replica to the end: at once, or in windows of `step` seconds."""
    replica = Replica(0, settings(**fields))
    if step is None:
        replica.assign(requests)
        replica.run_until(1e9)
        return replica.finish()
    pending, horizon = list(requests), 0.0
    while True:
        horizon += step
        due = [one for one in pending if one.at <= horizon]
        pending = pending[len(due) :]
        replica.assign(due)
        replica.run_until(horizon)
        if not pending and replica.report().is_idle:
            return replica.finish()


@pytest.mark.parametrize("step", [0.013, 0.25, 3.0])
def test_windows_of_any_length_give_the_same_steps(step: float) -> None:
    # Reports sample the queue, so `limits` depends on the windows.
    def comparable(outcome: Outcome) -> list[Any]:
        assert outcome.kv_peak > 0
        return figures(dataclasses.replace(outcome, limits=type(outcome.limits)()))

    assert comparable(run_alone(load(), step)) == comparable(run_alone(load()))


def test_a_replica_computes_what_the_serving_engine_computes() -> None:
    costs = StepCosts(base=0.002, per_token=0.0002, per_context=7e-7, per_pair=1e-7)
    requests = [PlannedRequest(n, 0.0, (unique_segment(n, 40 + 31 * n),), 9 + n) for n in range(20)]
    clock = VirtualClock()
    backend = CostModelBackend(
        clock, costs, vocabulary_size=1 << 48, max_context=CONTEXT, default_blocks=2048
    )
    engine = ServingEngine(backend, ADAPTIVE, clock=clock, seed=0)
    for one in requests:
        params = SamplingParams(max_tokens=one.answer_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(InferenceRequest(one.prompt(), params, request_id=RequestId(f"plan-{one.number}")))
    engine.run_until_idle()
    ends = clock.now
    # The same costs in the form of a profile. A decode counts its context as pairs there.
    same = MeasuredCosts(0.002, ((0, 0.0), (8192, 8192 * 0.0002)), 0.0, 7e-7, 1e-7, 7e-7)
    replica = Replica(0, settings(profile=profile(same, request_seconds=0.0)))
    replica._lengths = _NoPrediction()  # type: ignore[assignment]
    replica.assign(requests)
    replica.run_until(1e9)
    stats, other = engine.stats()[0], replica.scheduler.stats
    assert (other.steps, other.tokens_computed) == (stats.steps, stats.tokens_computed)
    assert replica.finish().ended == pytest.approx(ends, rel=0.02)


class _NoPrediction:
    def predict(self, features: Any) -> Any:
        return self

    def expected(self) -> None:
        return None

    def learn(self, *_: Any, **__: Any) -> None: ...


def test_every_request_ends_and_every_token_is_counted() -> None:
    requests = load()
    outcome = run_alone(requests)
    assert (outcome.requests, outcome.completed, outcome.refused) == (150, 150, 0)
    assert outcome.prompt_tokens == sum(one.prompt_tokens for one in requests)
    assert outcome.output_tokens == sum(one.answer_tokens for one in requests)
    assert outcome.gap.count == outcome.output_tokens - 150
    assert outcome.first_token.count == outcome.end_to_end.count == 150


def test_idle_work_has_no_targets() -> None:
    requests = [one._replace(is_idle_work=one.number % 2 == 0, priority=2) for one in load(20, 40.0)]
    outcome = run_alone(requests, targets=Targets(first_token=1e-6))
    assert (outcome.completed, outcome.late, outcome.good) == (20, 10, 10)


def test_the_server_reads_requests_one_after_another() -> None:
    requests = [PlannedRequest(n, 1.0, (unique_segment(n, 8),), 2) for n in range(4)]
    slow = run_alone(requests, profile=profile(COSTS, request_seconds=2.0))
    step = COSTS.base + COSTS.linear_seconds(8)
    assert slow.first_token.largest == pytest.approx(8.0 + step, rel=0.01)
    assert slow.first_token.quantile(0.5) == pytest.approx(4.0 + step, rel=0.01)


def test_requests_reach_the_scheduler_at_their_own_times_while_a_step_runs() -> None:
    replica, requests, seen = Replica(0, settings()), load(80, 20.0), dict[str, float]()
    replica.assign(requests)
    for window in range(1, 1000):
        replica.run_until(0.01 * window)
        seen.update((name, one.arrival) for name, one in replica.scheduler.sequences.items())
    expected, free_at = {}, 0.0
    for one in requests:
        free_at = max(free_at, one.at) + 0.003
        expected[f"plan-{one.number}"] = free_at
    assert len(seen) > 60, "too few requests were seen in the scheduler"
    assert seen == {name: pytest.approx(expected[name], abs=1e-9) for name in seen}


def test_a_shared_prefix_is_computed_once() -> None:
    shared = load(40, prefix=320, prefixes=1, prompt=LengthRange(16, 32))
    hits = run_alone(shared)
    assert hits.cached_tokens == 39 * 320
    off = dataclasses.replace(
        ADAPTIVE, scheduler=dataclasses.replace(ADAPTIVE.scheduler, prefix_caching=False)
    )
    assert run_alone(shared, config=off).cached_tokens == 0
    assert hits.first_token.mean < run_alone(shared, config=off).first_token.mean


def test_a_conversation_hits_the_blocks_of_its_answers() -> None:
    talk = load(
        40,
        rate=2.0,
        turns=LengthRange(4, 4),
        pause=20.0,
        prompt=LengthRange(30, 40),
        answer=LengthRange(50, 60),
    )
    outcome = run_alone(talk)
    by_session: dict[str | None, int] = {}
    expected = 0
    for one in talk:
        expected += by_session.get(one.session, 0)
        # All but the last token of the answer have K and V; complete blocks are cached.
        by_session[one.session] = (one.prompt_tokens + one.answer_tokens - 1) // 16 * 16
    assert outcome.cached_tokens == expected > 0


def test_shared_blocks_that_a_step_reads_twice_cost_less() -> None:
    requests = [PlannedRequest(n, 0.0, ((7, 512), unique_segment(n, 20)), 40) for n in range(16)]
    cheap = dataclasses.replace(COSTS, per_shared=0.0)
    dear = run_alone(requests, profile=profile(COSTS))
    assert run_alone(requests, profile=profile(cheap)).ended < dear.ended
    alone = [PlannedRequest(n, 0.0, (unique_segment(n, 532),), 40) for n in range(16)]
    same, other = (run_alone(alone, profile=profile(one)).ended for one in (COSTS, cheap))
    assert same == pytest.approx(other, rel=0.01), "blocks that are not shared count as shared"


def test_a_small_cache_preempts_and_a_two_tier_cache_of_the_same_size_holds_more() -> None:
    burst = [PlannedRequest(n, 0.0, (unique_segment(n, 200),), 200) for n in range(12)]
    room = profile(COSTS, blocks=120)
    full = run_alone(burst, profile=room)
    assert full.preemptions > 0 and full.completed == 12
    tiers = KvCachePoolConfig(kv_cache=KvCacheKind.TWO_TIER, tail_length=32, expected_context=400)
    both = run_alone(burst, profile=room, config=dataclasses.replace(ADAPTIVE, cache=tiers))
    assert both.completed == 12 and both.preemptions < full.preemptions


def test_memory_without_the_size_of_a_block_is_refused() -> None:
    room = dataclasses.replace(profile().room, bytes_per_block=0)
    cache = dataclasses.replace(ADAPTIVE, cache=KvCachePoolConfig(memory=1 << 20))
    with pytest.raises(InvalidRequestError, match="does not say how many bytes"):
        Replica(0, settings(profile=dataclasses.replace(profile(), room=room), config=cache))


def test_an_engine_that_does_not_plan_ahead_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"engine\.overlap is false"):
        Replica(0, settings(config=dataclasses.replace(ADAPTIVE, overlap=False)))


def test_requests_beyond_the_limits_are_refused_and_counted() -> None:
    requests = [PlannedRequest(0, 0.0, (unique_segment(0, 600),), 10), PlannedRequest(1, 0.0, ((5, 20),), 10)]
    outcome = run_alone(requests, context=512)
    assert (outcome.requests, outcome.refused, outcome.completed) == (2, 1, 1)


def test_targets_are_counted_by_request() -> None:
    requests = load(60, rate=40.0)
    outcome = run_alone(requests, targets=Targets(first_token=0.3, gap=0.05))
    within = outcome.first_token.share_within(0.3)
    assert outcome.late == pytest.approx(60 * (1 - within), abs=1.0) and outcome.late > 0
    assert outcome.slow > 0
    assert 60 - outcome.late - outcome.slow <= outcome.good <= 60 - max(outcome.late, outcome.slow)
    assert run_alone(requests, targets=Targets(100.0, 100.0)).good == 60


def test_the_reported_keys_are_those_of_the_cached_blocks() -> None:
    replica = Replica(0, settings(profile=profile(COSTS, blocks=150)))
    requests, known = load(60, prefix=64, prefixes=3), set[int]()
    replica.assign(requests)
    for window in range(1, 40):
        replica.run_until(0.25 * window)
        report = replica.report()
        known.update(array("Q", report.added))
        known.difference_update(array("Q", report.removed))
        cached = {one for one in replica.scheduler.kv_cache.pool._hashes if one is not None}
        assert known == {key_of(one) for one in cached}
    assert replica.scheduler.kv_cache.pool.evictions.cached > 0, "no block was evicted: the test says little"


def test_quantiles_are_within_half_a_percent() -> None:
    source, values, histogram = random.Random(1), [], FineHistogram()
    for _ in range(5000):
        values.append(source.lognormvariate(-3.0, 1.5))
        histogram.record(values[-1])
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert histogram.quantile(share) == pytest.approx(quantile(values, share), rel=0.0051)
    other = FineHistogram()
    other.record(1e9, 5000)
    other.add(histogram)
    assert other.quantile(0.25) == histogram.quantile(0.5) and other.quantile(0.75) == pytest.approx(
        1e9, rel=0.01
    )
    assert histogram.share_within(values[7]) == pytest.approx(
        sum(v <= values[7] for v in values) / 5000, abs=0.01
    )


# ---------------------------------------------------------------------- plans


def planned(**fields: Any) -> PlanSettings:
    description = Description(20.0, 200, LengthRange(16, 400), LengthRange(8, 80))
    given = {"targets": Targets(0.5, 0.2), "good_share": 0.95, "most": 16, "num_processes": 1, **fields}
    return PlanSettings(profile(), Load(CONTEXT, description), ServerSettings(engine=ADAPTIVE), **given)


def test_a_plan_finds_the_fewest_replicas_and_what_breaks_first() -> None:
    found = make_plan(planned())
    by_count = {one.replicas: one for one in found.tried}
    chosen = found.chosen
    assert chosen.is_enough and chosen.replicas > 1
    assert not by_count[chosen.replicas - 1].is_enough
    assert found.breaks is not None and found.breaks.speed > 1 and "late" in found.breaks.cause


@pytest.mark.parametrize("start", [1, 2, 7, 500])
def test_the_number_that_is_tried_first_does_not_change_the_answer(start: int) -> None:
    found = make_plan(planned(most=8), start=start)
    assert found.chosen.replicas == make_plan(planned(most=8)).chosen.replicas
    assert found.tried[0].replicas == min(start, 8)


def test_the_first_guess_grows_with_the_load() -> None:
    name = "load"
    guesses = [
        first_guess(profile(), LoadSummary(name, count, 10.0, 200, 100, 0)) for count in (1, 1000, 10_000)
    ]
    assert guesses[0] == 1 < guesses[1] < guesses[2] == pytest.approx(10 * guesses[1], rel=0.2)
    assert first_guess(profile(), LoadSummary(name, 100, 0.0, 200, 100, 0)) == 1


def test_a_plan_without_enough_replicas_says_so() -> None:
    found = make_plan(planned(most=1))
    assert not found.chosen.is_enough and found.breaks is None
    assert "first tokens are late" in found.chosen.cause


def test_a_sweep_whose_values_are_worse_recommends_the_present_settings() -> None:
    found = make_plan(planned(sweep={"engine.scheduler.max_running": ("1",)}))
    assert found.best is found.chosen and found.is_enough and not found.sweep[0].is_enough


def test_a_sweep_can_make_replicas_enough_that_are_not() -> None:
    one_row = dataclasses.replace(ADAPTIVE, scheduler=dataclasses.replace(ADAPTIVE.scheduler, max_running=1))
    plan = planned(least=3, most=3, sweep={"engine.scheduler.max_running": ("64",)})
    found = make_plan(dataclasses.replace(plan, settings=ServerSettings(engine=one_row)))
    assert not found.chosen.is_enough and found.best is not None and found.best.is_enough
    assert found.is_enough


def test_settings_that_cannot_run_are_found_before_the_first_simulation() -> None:
    lines: list[str] = []
    with pytest.raises(InvalidRequestError, match=r"KV cache|blocks|memory"):
        room = dataclasses.replace(profile().room, bytes_per_block=1 << 20)
        plan = planned(sweep={"memory": ("64MiB", "1KiB")}, num_processes=2)
        make_plan(dataclasses.replace(plan, profile=dataclasses.replace(profile(), room=room)), lines.append)
    assert not lines


def test_without_a_target_nothing_is_searched_that_breaks() -> None:
    found = make_plan(planned(targets=Targets(), least=1, most=1))
    assert found.chosen.is_enough and found.breaks is None and len(found.tried) == 1


def test_progress_counts_the_requests_of_all_simulations() -> None:
    seen: list[int] = []
    make_plan(planned(targets=Targets(), least=2, most=2), progress=seen.append)
    assert sum(seen) == 200 and len(seen) > 3


def test_a_sweep_ranks_settings_and_the_best_may_need_fewer_replicas() -> None:
    sweep = {"engine.scheduler.max_running": ("1", "64")}
    found = make_plan(planned(sweep=sweep))
    assert [one.changed["engine.scheduler.max_running"] for one in found.sweep] == ["64", "1"]
    assert found.best is not None and found.best.changed["engine.scheduler.max_running"] == "64"
    assert found.sweep[1].cause.endswith("all rows (max_running) are taken")


# ---------------------------------------------------------------------- event logs


def logged_run(path: Path) -> list[tuple[int, int]]:
    """Writes the event log of an engine on a virtual clock. Returns the lengths of its requests."""
    costs = StepCosts(base=0.003, per_token=0.0004, per_context=5e-7, per_pair=2e-7)
    clock = VirtualClock()
    backend = CostModelBackend(clock, costs, max_context=CONTEXT)
    engine = ServingEngine(backend, dataclasses.replace(ADAPTIVE, log_path=str(path)), clock=clock, seed=0)
    lengths = []
    for number, one in enumerate(load(120, 30.0)):
        clock.advance_to(one.at)
        prompt = tuple((7 * number + index) % 40_000 for index in range(one.prompt_tokens))
        params = SamplingParams(max_tokens=one.answer_tokens, temperature=0.0, ignore_eos=True)
        session = "talk" if number % 2 else None
        priority = Priority.HIGH if number % 2 else Priority.NORMAL
        engine.submit(
            InferenceRequest(
                prompt, params, session_id=session, priority=priority, is_idle_work=number % 10 == 2
            )
        )
        lengths.append((one.prompt_tokens, one.answer_tokens))
        engine.run_iteration()
    engine.run_until_idle()
    engine.stop()
    return lengths


def test_an_event_log_is_a_trace_with_the_recorded_lengths_and_prefixes(tmp_path: Path) -> None:
    lengths = logged_run(tmp_path / "engine.log")
    found = list(read_trace(tmp_path / "engine.log", context=CONTEXT))
    assert [(one.prompt_tokens, one.answer_tokens) for one in found] == lengths
    assert found[1].session == "talk" and found[0].session is None
    assert [(one.priority, one.is_idle_work) for one in found[:3]] == [(1, False), (2, False), (1, True)]
    assert run_alone(found).completed == 120


def test_a_profile_of_an_event_log_predicts_its_steps(tmp_path: Path) -> None:
    logged_run(tmp_path / "engine.log")
    found = profile_of_log(tmp_path / "engine.log", "machine", "model")
    assert found.room.num_blocks == 4096 and found.room.block_size == 16
    assert found.mean_error < 0.05
    shapes = read_steps(tmp_path / "engine.log").steps
    predicted = sum(found.costs.of(shape) for shape, _ in shapes)
    assert predicted == pytest.approx(sum(seconds for _, seconds in shapes), rel=0.01)


def test_the_profile_of_a_running_server_knows_a_gpu() -> None:
    model = StepCostModel()
    for tokens in range(1, 40):
        model.learn(tokens, tokens, 50 * tokens, tokens * tokens, 0.002 + 0.0001 * tokens)
    entry = {"kind": "costs", "name": "llama on a GPU, 0123", "costs": model.sums}
    room = {"block_size": 16, "num_blocks": 64, "swap_blocks": 0, "max_context": CONTEXT}
    for device in ("", "a GPU"):
        found = profile_of_server({"data": [entry]}, {**room, "device": device})
        assert (found.machine, found.model, found.is_gpu) == ("a GPU", "llama", bool(device))


def test_a_log_with_too_few_steps_or_of_no_engine_is_refused(tmp_path: Path) -> None:
    logged_run(tmp_path / "engine.log")
    lines = (tmp_path / "engine.log").read_text().splitlines(keepends=True)
    (tmp_path / "short.log").write_text("".join(lines[:30]))
    with pytest.raises(InvalidRequestError, match="a profile needs at least 200"):
        profile_of_log(tmp_path / "short.log", "machine", "model")
    broken = json.loads(lines[0])
    (tmp_path / "broken.log").write_text(json.dumps(broken) + '\n{"event": "apply", "clock": []}\n')
    for machine, model in ((None, "model"), ("machine", None)):
        with pytest.raises(InvalidRequestError, match="does not name its model or its machine"):
            profile_of_log(tmp_path / "engine.log", machine, model)
    with pytest.raises(InvalidRequestError, match="line 2: not an event"):
        profile_of_log(tmp_path / "broken.log", "machine", "model")


def test_the_shipped_profiles_run() -> None:
    for name in ("zen4-2-cores", "h200-8b-derived"):
        outcome = run_alone(load(30), profile=read_profile(name))
        assert outcome.completed == 30
