"""The whole engine on a virtual clock, over seeded scenarios."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import KvCacheKind, KvCachePoolConfig, ServingEngineConfig
from weft.engine.replay import describe, replay
from weft.engine.serving import ServingEngine
from weft.plan import IterationPlan
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams
from weft.simulation.check import check
from weft.simulation.run import Outcome, Simulation
from weft.simulation.scenario import Scenario, draw


def test_5000_scenarios_violate_no_invariant_and_cover_every_feature() -> None:
    report = check(5000)
    print(f"{report.scenarios / report.seconds:.0f} scenarios a second")
    for name in Outcome.__dataclass_fields__:
        assert getattr(report.outcome, name) > 50, f"the scenarios hardly ever cover {name}"


REGRESSION_SEEDS = [
    1388,
    2316,
    3107,
    5848,
    7604,
    8222,
    9273,
    14186,
    19651,
    24871,
    79146,
    85731,
    128135,
    130660,
    339498,
    500592,
    686581,
    801108,
]
"""Seeds of scenarios that once found an error in the scheduler or in the checks."""


@pytest.mark.parametrize("seed", REGRESSION_SEEDS)
def test_scenarios_that_once_found_an_error_pass(seed: int) -> None:
    check(1, seed)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = Simulation(draw(11)), Simulation(draw(11))
    assert first.run() == second.run()
    assert _tokens(first) == _tokens(second)


def test_idle_work_alone_gets_the_plans_of_ordinary_requests() -> None:
    for seed in range(150):
        plans = [_plans_of_equal_requests(draw(seed), is_idle_work) for is_idle_work in (False, True)]
        assert plans[0] == plans[1], f"scenario {seed}"


def _plans_of_equal_requests(scenario: Scenario, is_idle_work: bool) -> list[dict[str, Any] | None]:
    """The plans of a scenario whose requests all have the same priority, and are all idle work or none."""
    arrivals = [
        dataclasses.replace(
            arrival,
            request=dataclasses.replace(arrival.request, priority=Priority.LOW, is_idle_work=is_idle_work),
        )
        for arrival in scenario.arrivals
    ]
    engine = dataclasses.replace(scenario.engine, request_timeout=None)
    simulation = Simulation(dataclasses.replace(scenario, engine=engine, arrivals=tuple(arrivals)))
    schedule, plans = simulation.engine.scheduler.schedule, []

    def recorded() -> IterationPlan | None:
        plan = schedule()
        plans.append(None if plan is None else describe(plan))
        return plan

    simulation.engine.scheduler.schedule = recorded
    simulation.run()
    return plans


def _tokens(simulation: Simulation) -> dict[RequestId, list[int]]:
    return {rid: checker.tokens for rid, checker in simulation.output_checkers.items()}


@pytest.mark.parametrize("tail_blocks", [0, 1, 3])
def test_the_expected_tokens_of_the_check_are_those_of_a_request_alone_on_an_empty_engine(
    tail_blocks: int,
) -> None:
    cache = KvCachePoolConfig(num_blocks=64, block_size=4)
    if tail_blocks:
        tiers = {"kv_cache": KvCacheKind.TWO_TIER, "tail_length": 4 * tail_blocks, "store_blocks": 32}
        cache = dataclasses.replace(cache, **tiers)
    rng = random.Random(7)
    for _ in range(20):
        backend = NoopBackend(vocabulary_size=40, eos_token_ids=frozenset({3}))
        config = ServingEngineConfig(cache=cache, overlap=False)
        engine = ServingEngine(backend, config, clock=VirtualClock())
        params = SamplingParams(max_tokens=rng.randint(1, 30), seed=rng.randrange(100))
        request = InferenceRequest(tuple(rng.randrange(40) for _ in range(rng.randint(1, 60))), params)
        request_id = engine.submit(request)
        engine.run_until_idle()
        result = engine.get_result(request_id)
        assert result is not None
        limit = len(request.prompt) + params.max_tokens
        assert list(result.tokens) == generate_alone(
            request.prompt, params.seed or 0, params, limit, backend.info
        )


def test_recorded_scenarios_replay_exactly(tmp_path: Path) -> None:
    for seed in range(60):
        path = str(tmp_path / f"{seed}.jsonl")
        simulation = Simulation(draw(seed), log_path=path)
        outcome = simulation.run()
        simulation.engine.stop()
        report = replay(path)
        assert report.requests == len(simulation.output_checkers)
        assert report.steps >= outcome.steps
