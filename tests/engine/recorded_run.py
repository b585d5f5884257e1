"""Records the run of an engine with everything that a scheduler meets, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.backends.noop import NoopBackend
from weft.clock import Clock, VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.plan import IterationPlan, SwapTask
from weft.request import (
    Failure,
    FailureKind,
    InferenceRequest,
    Priority,
    RequestId,
    SamplingParams,
    numbered_ids,
)


class RandomFaults:
    """Random faults, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def at_submit(self, plan: IterationPlan) -> str | None:
        return "refused" if self._random.random() < 0.02 else None

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        chance = self._random.random()
        if plan.request_ids and chance < 0.02:
            return None, {self._random.choice(plan.request_ids): Failure(FailureKind.STEP, "its own")}
        return ("device error" if chance < 0.04 else None), {}

    def at_wait(self, plan: IterationPlan) -> str | None:
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        return "lost" if self._random.random() < 0.1 else None


def record(
    path: Path,
    seed: int = 9,
    words: int = 50_000,
    *,
    watch: Callable[[ServingEngine, Clock], object] = lambda engine, clock: None,
    **options: Any,
) -> ServingEngine:
    """Records a run with arrivals, priorities, deadlines, cancels, preemption and faults, by a seed. With few `words`
    many draft tokens are accepted. `watch` gets the engine before the run."""
    source = random.Random(seed)
    clock = VirtualClock()
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(
            **{
                "policy": PriorityPolicy.ADAPTIVE,
                "max_running": 4,
                "max_chunk_tokens": 8,
                "max_prefill_tokens": 16,
                "max_tokens_per_step": 32,
                **options,
            }
        ),
        cache=KvCachePoolConfig(num_blocks=16, block_size=4, swap_blocks=8),
        log_path=str(path),
    )
    backend = NoopBackend(
        vocabulary_size=words,
        random_source=random.Random(seed),
        faults=RandomFaults(seed),
        eos_token_ids=frozenset({3}) if words > 50 else frozenset(),
        fixed_cost_rows=0.0 if words > 50 else 100.0,
    )
    engine = ServingEngine(backend, config, clock=clock, seed=seed, new_id=numbered_ids())
    watch(engine, clock)
    for iteration in range(300):
        if iteration < 200 and iteration % 4 == 0:
            length = source.randrange(1, 30)
            submitted = InferenceRequest(
                tuple(7 * position % min(words, 50) for position in range(length)),
                SamplingParams(max_tokens=source.randrange(1, 24), logit_bias={1: 1.5}, stop=("x",)),
                priority=Priority(source.randrange(4)),
                deadline=source.choice([None, None, 3.0]),
                ttft_target=source.choice([None, 0.5]),
                metadata={"user": "someone"},
            )
            engine.submit(submitted)
        if source.random() < 0.1:
            engine.cancel(RequestId(str(source.randrange(50))), "changed my mind")
        engine.run_iteration()
        clock.advance(source.random() * 0.2)
    engine.run_until_idle()
    engine.stop()
    return engine
