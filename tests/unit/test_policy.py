"""The order of each policy, and the cost model by which ADAPTIVE sizes prompt chunks."""

from __future__ import annotations

import math
import random

import pytest

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig
from weft.lengths import ExpectedLength
from weft.request import InferenceRequest, Priority, RequestId, RequestState, SamplingParams
from weft.scheduling.policy import OVERTAKING_FACTOR, AdmissionPolicy, StepCostModel
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence


def waiting(
    order: int,
    arrival: float = 0.0,
    priority: Priority = Priority.NORMAL,
    length: int = 1,
    max_tokens: int = 1,
    target: float | None = None,
    preempted: bool = False,
    expected: float | None = None,
    cost: float = 0.0,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    request = InferenceRequest(tuple([1] * length), params, priority=priority, ttft_target=target)
    sequence = Sequence(request.replaced(request_id=RequestId(str(order))), 0)
    if expected is not None:
        sequence.request = sequence.request.replaced(expected=ExpectedLength(expected, expected, expected))
    sequence.order, sequence.arrival, sequence.cost = order, arrival, cost
    if preempted:
        sequence.state = RequestState.PREEMPTED
    return sequence


def order_of(config: SchedulerConfig, *sequences: Sequence) -> list[int]:
    policy = AdmissionPolicy(config)
    return [s.order for s in sorted(sequences, key=lambda s: policy.sort_key(s))]


def test_fcfs_ignores_priority_and_length() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.FCFS)
    long_low = waiting(0, priority=Priority.LOW, max_tokens=500)
    short_critical = waiting(1, arrival=1.0, priority=Priority.CRITICAL)
    assert order_of(config, short_critical, long_low) == [0, 1]


def test_fcfs_admits_a_preempted_sequence_before_later_arrivals() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.FCFS)
    assert order_of(config, waiting(2), waiting(0, preempted=True), waiting(1)) == [0, 1, 2]


def test_the_shortest_job_goes_first_counting_prompt_and_new_tokens_together() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    jobs = [
        waiting(0, length=10, max_tokens=1),
        waiting(1, length=2, max_tokens=3),
        waiting(2, length=1, max_tokens=7),
    ]
    assert order_of(config, *jobs) == [1, 2, 0]


def test_the_expected_length_counts_instead_of_max_tokens_but_never_more_than_it() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    jobs = [
        waiting(0, max_tokens=500),
        waiting(1, max_tokens=500, expected=30),
        waiting(2, max_tokens=20, expected=9000),
    ]
    assert order_of(config, *jobs) == [2, 1, 0]


def test_shorter_jobs_overtake_a_long_one_only_for_a_limited_time() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    long, end = waiting(0, arrival=5.0, cost=10.0), 5.0 + OVERTAKING_FACTOR * 10.0
    assert order_of(config, long, waiting(1, arrival=end - 2.1 * OVERTAKING_FACTOR, cost=2.0)) == [1, 0]
    assert order_of(config, long, waiting(1, arrival=end - 1.9 * OVERTAKING_FACTOR, cost=2.0)) == [0, 1]
    assert order_of(config, long, waiting(1, arrival=end + 0.1)) == [0, 1]


def test_a_longer_expected_answer_costs_more_once_the_cost_of_steps_is_known() -> None:
    model = StepCostModel()
    policy = AdmissionPolicy(SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST), model)
    first = waiting(0, max_tokens=500, expected=30)
    policy.set_cost(first, rows=4)
    assert first.cost == 0, "nothing is known yet"
    train(model, 50, random.Random(0))
    short, long, unknown = (waiting(0, max_tokens=500, expected=one) for one in (30, 300, None))
    for sequence in (short, long, unknown):
        policy.set_cost(sequence, rows=4)
    for sequence, length in ((short, 30), (long, 300), (unknown, 500)):
        # 0.01 s for a step, 0.0002 s for each token of four rows, and 1e-6 s for each position that they read.
        seconds = length * (0.01 + 4 * 2e-4 + 4 * (length / 2) * 1e-6)
        assert sequence.cost == pytest.approx(seconds, rel=0.05)
    fcfs = AdmissionPolicy(SchedulerConfig(policy=PriorityPolicy.FCFS), model)
    other = waiting(0, max_tokens=500, expected=30)
    fcfs.set_cost(other, rows=4)
    assert other.cost == 0


def test_adaptive_orders_by_cost_only_with_an_expected_length_and_without_a_target() -> None:
    model = StepCostModel()
    train(model, 50, random.Random(0))
    config = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE)
    policy = AdmissionPolicy(config, model)
    plain, long = waiting(0, max_tokens=500), waiting(0, max_tokens=500, expected=300)
    for sequence in (plain, long):
        policy.set_cost(sequence, rows=4)
    assert plain.cost == 0 and policy.sort_key(plain) == policy.sort_key(waiting(0, max_tokens=500))
    later = long.cost * OVERTAKING_FACTOR
    assert order_of(config, long, waiting(1, arrival=later - 0.1)) == [1, 0]
    assert order_of(config, long, waiting(1, arrival=later + 0.1)) == [0, 1]
    same_target = [waiting(0, target=5.0, cost=100.0), waiting(1, arrival=0.1, target=5.0)]
    assert order_of(config, *same_target) == [0, 1]


def test_equally_short_jobs_go_in_order_of_arrival() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    assert order_of(config, waiting(3), waiting(1), waiting(2)) == [1, 2, 3]


def test_a_long_preempted_sequence_goes_before_new_short_jobs() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST)
    assert order_of(config, waiting(1), waiting(0, max_tokens=900, preempted=True)) == [0, 1]


def test_higher_priority_goes_first_and_age_offsets_it_at_the_configured_rate() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.PRIORITY, ageing_rate=0.1)
    low, high = waiting(0, 0.0, Priority.LOW), waiting(1, 19.0, Priority.HIGH)
    assert order_of(config, low, high) == [1, 0], "19 s are worth 1.9 levels, and the difference is 2"
    assert order_of(config, low, waiting(1, 21.0, Priority.HIGH)) == [0, 1]


def test_age_never_overtakes_critical() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.PRIORITY, ageing_rate=10.0)
    assert order_of(config, waiting(0, 0.0, Priority.HIGH), waiting(1, 1e9, Priority.CRITICAL)) == [1, 0]


def test_without_ageing_only_priority_and_arrival_count() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.PRIORITY, ageing_rate=0.0)
    requests = [
        waiting(0, 0.0, Priority.LOW),
        waiting(1, 1.0),
        waiting(2, 2.0),
        waiting(3, 1e9, Priority.HIGH),
    ]
    assert order_of(config, *requests) == [3, 1, 2, 0]


def test_adaptive_admits_the_earliest_first_token_target_first() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE)
    requests = [
        waiting(0, 0.0),
        waiting(1, 1.0, target=5.0),
        waiting(2, 2.0, target=0.5),
        waiting(3, 0.0, target=60.0),
    ]
    assert order_of(config, *requests) == [2, 1, 0, 3]


def test_adaptive_ages_a_preempted_sequence_from_its_arrival() -> None:
    config = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE)
    assert order_of(config, waiting(1, 1.0, target=0.0), waiting(0, 0.0, preempted=True)) == [0, 1]


@pytest.mark.parametrize(
    ("policy", "preempts"),
    [
        (PriorityPolicy.FCFS, False),
        (PriorityPolicy.SHORTEST_JOB_FIRST, False),
        (PriorityPolicy.PRIORITY, True),
        (PriorityPolicy.ADAPTIVE, True),
    ],
)
def test_only_policies_with_priorities_preempt_for_waiting_requests(
    policy: PriorityPolicy, preempts: bool
) -> None:
    assert AdmissionPolicy(SchedulerConfig(policy=policy)).preempts is preempts


# ---------------------------------------------------------------------- the cost model


def machine(
    tokens: int,
    context: int,
    pairs: int,
    base: float = 0.01,
    per_token: float = 2e-4,
    per_context: float = 1e-6,
    per_pair: float = 1e-8,
) -> float:
    return base + per_token * tokens + per_context * context + per_pair * pairs


def train(
    model: StepCostModel, steps: int, source: random.Random, noise: float = 0.0, **truth: float
) -> None:
    for _ in range(steps):
        prefill, decodes = source.choice([0, 16, 64, 256, 512]), source.randrange(1, 64)
        decode_context, before = decodes * source.randrange(1, 2000), source.randrange(0, 4000)
        tokens, context = prefill + decodes, decode_context + (before + prefill if prefill else 0)
        pairs = decode_context + prefill * before + prefill * (prefill + 1) // 2
        seconds = machine(tokens, context, pairs, **truth) * (1 + noise * source.uniform(-1, 1))
        model.learn(prefill, tokens, context, pairs, seconds)


def test_the_cost_model_learns_the_coefficients_of_a_machine() -> None:
    model = StepCostModel()
    train(model, 200, random.Random(0))
    base, per_token, per_context, per_pair = model.coefficients
    assert base == pytest.approx(0.01, rel=0.05)
    assert per_token == pytest.approx(2e-4, rel=0.05)
    assert per_context == pytest.approx(1e-6, rel=0.05)
    assert per_pair == pytest.approx(1e-8, rel=0.05)
    assert model.predict(300, 20_000, 90_000) == pytest.approx(machine(300, 20_000, 90_000), rel=0.01)


def test_the_cost_model_predicts_a_noisy_machine() -> None:
    model = StepCostModel()
    train(model, 400, random.Random(1), noise=0.2)
    assert model.predict(300, 20_000, 90_000) == pytest.approx(machine(300, 20_000, 90_000), rel=0.15)


def test_the_cost_model_follows_a_machine_that_becomes_slower() -> None:
    model = StepCostModel()
    train(model, 300, random.Random(2))
    train(model, 400, random.Random(3), per_token=1e-3)
    expected = machine(300, 20_000, 90_000, per_token=1e-3)
    assert model.predict(300, 20_000, 90_000) == pytest.approx(expected, rel=0.05)


def test_many_decode_steps_do_not_erase_the_cost_of_a_prompt_token() -> None:
    model = StepCostModel()
    train(model, 200, random.Random(4))
    for step in range(5000):
        context = 8 * (500 + step % 500)
        model.learn(0, 8, context, context, machine(8, context, context))
    assert model.coefficients[1] == pytest.approx(2e-4, rel=0.1)


def test_affordable_tokens_fill_the_target_and_do_not_exceed_it() -> None:
    model = StepCostModel()
    train(model, 200, random.Random(5))
    start = 1000
    tokens = model.affordable_tokens(start, 0.1 - model.decode_seconds(10, 5000))
    pairs = 5010 + tokens * start + tokens * (tokens + 1) // 2
    assert machine(10 + tokens, 5010 + start + tokens, pairs) == pytest.approx(0.1, rel=0.02)
    assert model.affordable_tokens(0, -0.001) == 0, (
        "without time there are no tokens, never a negative number"
    )


@pytest.mark.parametrize("odd_step", [0, 4, 9])
def test_one_slow_step_does_not_raise_all_predictions(odd_step: int) -> None:
    model, source = StepCostModel(), random.Random(8)
    ratios = []
    for step in range(60):
        decodes, start, prefill = step // 3, source.randrange(0, 400), source.randrange(16, 200)
        decode_context = 200 * decodes
        tokens, context = decodes + prefill, decode_context + start + prefill
        pairs = decode_context + prefill * start + prefill * (prefill + 1) // 2
        seconds = machine(tokens, context, pairs) * source.uniform(0.95, 1.05) + 0.25 * (step == odd_step)
        if step > odd_step + 20:
            ratios.append(model.predict(tokens, context, pairs) / seconds)
        model.learn(prefill, tokens, context, pairs, seconds)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.2)


def test_a_step_during_which_the_machine_slept_hardly_changes_predictions() -> None:
    model = StepCostModel()
    train(model, 200, random.Random(9))
    for prefill in (256, 0):
        model.learn(prefill, 8 + prefill, 4000 + prefill, 4000 + 33_000, 3600.0)
    assert model.predict(264, 4256, 37_000) < 1.5 * machine(264, 4256, 37_000)
    assert model.affordable_tokens(0, 0.1) > 100


def test_steps_that_took_no_time_may_take_seconds_later() -> None:
    model = StepCostModel()
    for _ in range(3):
        model.learn(16, 16, 16, 136, 0.0)
    for _ in range(100):
        model.learn(512, 512, 512, 131_328, 5.0)
    assert model.predict(512, 512, 131_328) == pytest.approx(5.0, rel=0.05)


def test_a_machine_whose_steps_all_take_seconds_is_learned() -> None:
    model = StepCostModel()
    train(model, 200, random.Random(10))
    train(model, 400, random.Random(11), base=2.0, per_token=0.1)
    expected = machine(300, 20_000, 90_000, base=2.0, per_token=0.1)
    assert model.predict(300, 20_000, 90_000) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("start", [0, 1, 700, 6000])
def test_affordable_tokens_match_the_cost_of_a_chunk_to_the_token(start: int) -> None:
    model = StepCostModel()
    train(model, 200, random.Random(6))
    tokens = model.affordable_tokens(start, 0.05)
    assert model.chunk_seconds(start, tokens) <= 0.05 < model.chunk_seconds(start, tokens + 1)


@pytest.mark.parametrize(
    "steps",
    [
        [(16, 16, 16, 0.01)] * 50,
        [(16, 16, 16, 0.0)] * 5,
        [(0, 1, 1, 0.01)] * 50,
        [(2**20, 2**20, 2**30, 1e6)] * 5,
        [(1, 1, 1, 1e-9), (10**6, 10**6, 10**6, 1e-9)],
        [(512, 512, 512, 0.5), (16, 16, 16, 5.0)],
    ],
    ids=["equal steps", "no time", "decodes only", "giant", "free", "larger is faster"],
)
def test_degenerate_steps_give_finite_coefficients_that_are_never_negative(
    steps: list[tuple[int, int, int, float]],
) -> None:
    model = StepCostModel()
    for prefill, tokens, context, seconds in steps:
        model.learn(prefill, tokens, context, context, seconds)
    assert all(math.isfinite(c) and c >= 0 for c in model.coefficients)
    assert math.isfinite(model.predict(100, 100, 100))
    assert model.affordable_tokens(0, 0.2) >= 0
    assert model.chunk_seconds(100, 100) >= 0


def test_a_cost_model_without_prompts_is_not_ready() -> None:
    model = StepCostModel()
    for _ in range(10):
        model.learn(0, 4, 4, 4, 0.01)
    assert not model.is_ready, "decode steps do not show the cost of prompts"
    for _ in range(3):
        model.learn(16, 20, 20, 20, 0.01)
    assert model.is_ready


@pytest.mark.parametrize("per_context", [0.0, 1e-6, 1e-5], ids=["flat", "usual", "expensive context"])
def test_adaptive_meets_the_inter_token_target_on_a_known_machine(per_context: float) -> None:
    clock = VirtualClock()
    backend = NoopBackend(max_context=8192)
    info = backend.allocate(KvCachePoolConfig(num_blocks=2048), 16)
    config = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, max_running=16, target_inter_token_latency=0.1)
    scheduler = ContinuousBatchScheduler(config, info, clock)
    source = random.Random(7)
    measured: list[tuple[float, int]] = []
    next_id = 0
    for step in range(600):
        if step % 20 == 0:
            length = 4000 if step % 100 == 0 else 50
            prompt = tuple(source.randrange(50_000) for _ in range(length))
            request = InferenceRequest(prompt, SamplingParams(max_tokens=60))
            scheduler.add(Sequence(request.replaced(request_id=RequestId(str(next_id))), next_id))
            next_id += 1
        plan = scheduler.schedule()
        if plan is None:
            continue
        context = sum(plan.starts) + plan.num_tokens
        seconds = machine(plan.num_tokens, context, 0, per_context=per_context)
        clock.advance(seconds)
        scheduler.apply(plan, backend.submit(plan).result(), seconds)
        if plan.num_decodes and plan.num_prefills:
            measured.append((seconds, sum(task.num_tokens for task in plan.prefill_tasks)))
    learned = measured[len(measured) // 4 :]
    assert len(learned) > 30
    assert max(seconds for seconds, _ in learned) <= 0.1 * 1.1
    # Prompts still progress: at 0.2 ms a token, hundreds of tokens fit into 0.1 s.
    assert max(tokens for _, tokens in learned) > 200
