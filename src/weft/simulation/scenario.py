"""A simulated run, drawn from a seed: a machine, a configuration, requests, cancellations and faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass

from weft.backends.noop_model import FORCING
from weft.config import (
    KvCacheKind,
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.lengths import ExpectedLength
from weft.plan import IterationPlan, SwapTask
from weft.request import Failure, FailureKind, Grammar, InferenceRequest, Priority, RequestId, SamplingParams

POLICIES = tuple(PriorityPolicy)
MODES = (*PreemptionMode, PreemptionMode.SWAP)
PRIORITIES = tuple(Priority)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    request: InferenceRequest
    cancel_at: float | None
    callback_raises_at: int | None
    """The index of the output on which the callback raises."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    engine: ServingEngineConfig
    vocabulary_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    recompute_seconds_per_token: float
    swap_seconds_per_block: float
    eager_blocks: int | None
    grammars_may_overlap: bool
    fixed_cost_rows: float
    extra_rows_are_cheap: bool
    fault_rates: tuple[float, float, float, float]
    """Probabilities: per submit, per step, per request and step, per swap."""
    max_step_seconds: float
    arrivals: tuple[Arrival, ...]


def draw(seed: int) -> Scenario:
    """Draws a small scenario with scarce resources: tiny blocks, tiny pools, few rows."""
    scenario = _draw_drafts(random.Random(f"drafts {seed}"), _draw_plain(seed))
    scenario = _draw_predictions(random.Random(f"predictions {seed}"), scenario)
    scenario = _draw_forced(random.Random(f"forced {seed}"), scenario)
    scenario = _draw_idle_work(random.Random(f"idle {seed}"), scenario)
    return _draw_lengths(random.Random(f"lengths {seed}"), scenario)


def _draw_plain(seed: int) -> Scenario:
    rng = random.Random(seed)
    scheduler = _draw_scheduler(rng)
    # Later additions use random sources of their own, so that old seeds still draw the same scenarios.
    later = random.Random(f"later {seed}")
    latest = random.Random(f"latest {seed}")
    scheduler = dataclasses.replace(scheduler, session_lifetime=later.choice((0.0, 0.05, 600.0)))
    block_size = rng.choice((1, 2, 2, 3, 4, 4, 8))
    # Most pools hold two or three sequences of full length, so memory often runs out.
    num_blocks = -(-rng.randint(12, 60) // block_size) if rng.random() < 0.8 else rng.randint(40, 100)
    swap_blocks = rng.choice((0, rng.randint(1, 8), num_blocks))
    engine = ServingEngineConfig(
        scheduler=scheduler,
        cache=_draw_tiers(
            random.Random(f"tiers {seed}"),
            KvCachePoolConfig(num_blocks=num_blocks, block_size=block_size, swap_blocks=swap_blocks),
        ),
        overlap=rng.random() < 0.6,
        request_timeout=rng.uniform(0.2, 5.0) if rng.random() < 0.05 else None,
    )
    vocabulary_size = rng.choice((30, 200, 50_000))
    max_context = rng.choice((24, 64, 1024))
    return Scenario(
        seed=seed,
        engine=engine,
        vocabulary_size=vocabulary_size,
        max_context=max_context,
        eos_token_ids=frozenset(rng.sample(range(vocabulary_size), 2)) if rng.random() < 0.5 else frozenset(),
        recompute_seconds_per_token=rng.choice((1e-5, 1e-4, 1e-3)),
        swap_seconds_per_block=1e-4,
        eager_blocks=later.choice((None, 0, num_blocks // 4)),
        grammars_may_overlap=latest.random() < 0.1,
        fixed_cost_rows=0.0,
        extra_rows_are_cheap=False,
        fault_rates=_draw_fault_rates(rng),
        max_step_seconds=rng.choice((0.01, 0.1)),
        arrivals=_draw_grammars(
            latest,
            _draw_later(later, _draw_arrivals(rng, scheduler, min(num_blocks * block_size, max_context))),
        ),
    )


def _draw_tiers(rng: random.Random, cache: KvCachePoolConfig) -> KvCachePoolConfig:
    """Returns the same cache, or one with two tiers. A cache with two tiers has short tails, and often so few full blocks
    that they hold little more than one tail."""
    if rng.random() < 0.6:
        return cache
    assert cache.num_blocks is not None
    tail_blocks = rng.choice((1, 1, 2, 3))
    full = tail_blocks + 2 + (rng.randint(0, 3) if rng.random() < 0.4 else rng.randint(0, cache.num_blocks))
    return dataclasses.replace(
        cache,
        kv_cache=KvCacheKind.TWO_TIER,
        tail_length=tail_blocks * cache.block_size,
        num_blocks=full,
        store_blocks=max(2, rng.randint(cache.num_blocks // 2, cache.num_blocks + 4)),
    )


def _draw_scheduler(rng: random.Random) -> SchedulerConfig:
    max_running = rng.choice((1, 2, 3, 4, 5, 6, 8, 8))
    per_step = rng.randint(1, max_running) if rng.random() < 0.3 else max_running
    chunked = rng.random() < 0.85
    tokens = per_step + (rng.randint(0, 24) if chunked else rng.randint(8, 64))
    return SchedulerConfig(
        policy=rng.choice(POLICIES),
        max_running=max_running,
        max_sequences_per_step=per_step,
        max_tokens_per_step=tokens,
        max_prefill_tokens=rng.randint(1, tokens) if chunked else tokens,
        max_chunk_tokens=rng.choice((1, 3, 7, 16, 64)),
        chunked_prefill=chunked,
        prefer_pure_decode=rng.random() < 0.15,
        dynamic_batching=rng.random() < 0.88,
        prefix_caching=rng.random() < 0.65,
        preemption=rng.choice(MODES),
        ageing_rate=rng.choice((0.0, 0.1, 5.0)),
        target_inter_token_latency=rng.choice((0.001, 0.02, 1.0)),
        max_waiting_requests=3 if rng.random() < 0.1 else 100,
        max_waiting_tokens=60 if rng.random() < 0.1 else 100_000,
    )


def _draw_fault_rates(rng: random.Random) -> tuple[float, float, float, float]:
    if rng.random() < 0.6:
        return (0.0, 0.0, 0.0, 0.0)
    rates = [rng.choice((0.0, 0.02, 0.15)) for _ in range(4)]
    return (rates[0], rates[1], rates[2] / 4, 2 * rates[3])


def _draw_arrivals(rng: random.Random, scheduler: SchedulerConfig, capacity: int) -> tuple[Arrival, ...]:
    prefixes = [tuple(rng.randrange(30) for _ in range(24)) for _ in range(2)]
    shares = rng.random() < 0.6
    mixed_priorities = rng.random() < 0.6
    cancels = rng.random() < 0.4
    burst = rng.choice((0.0, 0.02, 0.2))
    longest = min(capacity - 1, 30)
    if not scheduler.chunked_prefill and rng.random() < 0.9:
        longest = min(longest, scheduler.longest_whole_prompt)
    moment, arrivals = 0.0, []
    for _ in range(rng.randint(2, 9)):
        moment += rng.expovariate(1 / burst) if burst else 0.0
        length = (max if shares else min)(rng.randint(1, longest), rng.randint(1, longest))
        prompt = tuple(rng.randrange(30) for _ in range(length))
        if shares and rng.random() < 0.8:
            shared = min(length, rng.randint(4, 24))
            prompt = (rng.choice(prefixes)[:shared] + prompt)[:length]
        max_tokens = rng.randint(1, 4) if rng.random() < 0.3 else rng.randint(4, 24)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            seed=rng.randrange(3) if rng.random() < 0.5 else None,
            stop_token_ids=(rng.randrange(30),) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.2,
            prompt_logprobs=1 if rng.random() < 0.05 else None,
        )
        request = InferenceRequest(
            prompt=prompt,
            params=params,
            priority=rng.choice(PRIORITIES) if mixed_priorities else Priority.NORMAL,
            cache_salt=rng.choice(("", "", "", "pepper")),
            ttft_target=rng.uniform(0.0, 1.0) if rng.random() < 0.2 else None,
            deadline=rng.uniform(0.0, 2.0) if rng.random() < 0.08 else None,
        )
        cancel_at = moment + rng.expovariate(4.0) if cancels and rng.random() < 0.4 else None
        raises_at = rng.randrange(6) if rng.random() < 0.04 else None
        arrivals.append(Arrival(moment, request, cancel_at, raises_at))
    return tuple(arrivals)


def _draw_later(rng: random.Random, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """Returns the same arrivals, with changes: some have sessions, logprobs, or no token limit."""
    has_sessions = rng.random() < 0.4
    drawn = []
    for arrival in arrivals:
        request = arrival.request
        params = request.params
        if rng.random() < 0.15:
            params = dataclasses.replace(params, logprobs=rng.randrange(3))
        if rng.random() < 0.03 and not params.min_tokens:
            params = dataclasses.replace(params, max_tokens=None)
        session = rng.choice((None, "a", "b")) if has_sessions else None
        request = dataclasses.replace(request, params=params, session_id=session)
        drawn.append(dataclasses.replace(arrival, request=request))
    return tuple(drawn)


def _draw_grammars(rng: random.Random, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """Returns the same arrivals. In half of the scenarios, some or all get a grammar."""
    share = rng.choice((0.0, 0.0, 0.4, 1.0))
    drawn = []
    for arrival in arrivals:
        params = arrival.request.params
        if rng.random() < share and not params.ignore_eos:
            params = dataclasses.replace(params, grammar=Grammar("regex", ".*"))
            arrival = dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, params=params)
            )
        drawn.append(arrival)
    return tuple(drawn)


def _draw_drafts(rng: random.Random, scenario: Scenario) -> Scenario:
    """Returns the same scenario, or one with draft tokens. Its vocabulary is tiny, so that many draft tokens are
    accepted and many rejected."""
    if rng.random() < 0.6:
        return scenario
    vocabulary_size = rng.choice((2, 3, 5))
    engine = scenario.engine
    scheduler = dataclasses.replace(
        engine.scheduler,
        max_draft_tokens=rng.choice((1, 3, 11)),
        # This value is not drawn: a further draw would change the scenarios of seeds that failed once.
        max_learned_bytes=(64 << 20, 24_000, 0)[len(scenario.arrivals) % 3],
    )
    return dataclasses.replace(
        scenario,
        engine=dataclasses.replace(engine, scheduler=scheduler),
        vocabulary_size=vocabulary_size,
        eos_token_ids=frozenset([0]) if rng.random() < 0.2 else frozenset(),
        fixed_cost_rows=rng.choice((2.0, 8.0, 1000.0)),
        arrivals=tuple(_with_few_tokens(arrival, vocabulary_size) for arrival in scenario.arrivals),
    )


def _with_few_tokens(arrival: Arrival, vocabulary_size: int) -> Arrival:
    request = arrival.request
    prompt = tuple(token % vocabulary_size for token in request.prompt)
    return dataclasses.replace(arrival, request=dataclasses.replace(request, prompt=prompt))


def _draw_predictions(rng: random.Random, scenario: Scenario) -> Scenario:
    """Returns the same scenario. If it has draft tokens, half of its requests get a prediction."""
    if not scenario.fixed_cost_rows:
        return scenario
    arrivals = []
    for arrival in scenario.arrivals:
        if rng.random() < 0.5:
            length = rng.choice((1, 4, 20, 60))
            prediction = tuple(rng.randrange(scenario.vocabulary_size) for _ in range(length))
            arrival = dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, prediction=prediction)
            )
        arrivals.append(arrival)
    return dataclasses.replace(scenario, arrivals=tuple(arrivals))


def _draw_forced(rng: random.Random, scenario: Scenario) -> Scenario:
    """Returns the same scenario. If it has draft tokens, half of its requests, or all or none, get a grammar that forces
    tokens."""
    share = rng.choice((0.0, 0.5, 1.0))
    if not scenario.fixed_cost_rows or not share:
        return scenario
    arrivals = []
    for arrival in scenario.arrivals:
        params = arrival.request.params
        if rng.random() < share and not params.ignore_eos:
            params = dataclasses.replace(params, grammar=FORCING)
            arrival = dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, params=params)
            )
        arrivals.append(arrival)
    return dataclasses.replace(scenario, arrivals=tuple(arrivals))


def _draw_idle_work(rng: random.Random, scenario: Scenario) -> Scenario:
    """Returns the same scenario, or one where some or all requests are idle work. In half of these, idle work may share
    steps with interactive requests."""
    if rng.random() < 0.75:
        return scenario
    share, shares_steps = rng.choice((0.3, 0.6, 0.6, 1.0)), rng.random() < 0.5
    engine = scenario.engine
    if shares_steps:
        scheduler = dataclasses.replace(
            engine.scheduler,
            policy=PriorityPolicy.ADAPTIVE,
            target_inter_token_latency=rng.choice((0.05, 0.2, 1.0)),
            prefer_pure_decode=engine.scheduler.prefer_pure_decode and rng.random() < 0.2,
            chunked_prefill=engine.scheduler.chunked_prefill or rng.random() < 0.8,
        )
        engine = dataclasses.replace(engine, scheduler=scheduler)
    return dataclasses.replace(
        scenario,
        engine=engine,
        extra_rows_are_cheap=shares_steps,
        arrivals=tuple(
            dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, is_idle_work=rng.random() < share)
            )
            for arrival in scenario.arrivals
        ),
    )


def _draw_lengths(rng: random.Random, scenario: Scenario) -> Scenario:
    """Returns the same scenario, or one whose requests have expected lengths: right ones, ones that are wrong by up to 100
    times, or both."""
    if rng.random() < 0.4:
        return scenario
    share_right, share_none = rng.choice((0.0, 0.5, 1.0)), rng.choice((0.0, 0.0, 0.3))

    def expected(request: InferenceRequest) -> ExpectedLength | None:
        if rng.random() < share_none:
            return None
        length = request.params.max_tokens or 20
        mean = length * (1.0 if rng.random() < share_right else 10 ** rng.uniform(-2, 2))
        return ExpectedLength(mean, mean, mean)

    return dataclasses.replace(
        scenario,
        arrivals=tuple(
            dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, expected=expected(arrival.request))
            )
            for arrival in scenario.arrivals
        ),
    )


class DrawnFaults:
    """Draws faults at the scenario's rates. Records them, because no request may fail without a fault."""

    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self._submit, self._step, self._request, self._swap = scenario.fault_rates
        self._rng = rng
        self.num_unattributed = 0
        """Faults of whole steps with requests in them. Such a fault belongs to no single request."""
        self.hit_requests: set[RequestId] = set()

    def at_submit(self, plan: IterationPlan) -> str | None:
        if self._submit and self._rng.random() < self._submit:
            self.num_unattributed += bool(plan.rows)
            return "simulated fault at submit"
        return None

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        errors: dict[RequestId, Failure] = {}
        if self._request:
            fault = Failure(FailureKind.STEP, "simulated fault")
            errors = {r: fault for r in plan.request_ids if self._rng.random() < self._request}
            self.hit_requests.update(errors)
        if self._step and self._rng.random() < self._step:
            self.num_unattributed += bool(plan.rows)
            return "simulated fault at result", errors
        return None, errors

    def at_wait(self, plan: IterationPlan) -> str | None:
        if self._step and self._rng.random() < self._step / 2:
            self.num_unattributed += bool(plan.rows)
            return "simulated fault while waiting"
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        return "simulated swap fault" if self._swap and self._rng.random() < self._swap else None
