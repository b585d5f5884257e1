"""The cost-model backend against times computed by hand: steps, overlapped steps, swaps and their reports."""

from __future__ import annotations

import pytest

from weft.backends.cost_model import H200_LLAMA_8B, ZEN3_SMOLLM2_135M, CostModelBackend, StepCosts
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.plan import IterationPlan, SwapTask
from weft.request import InferenceRequest, RequestId, SamplingParams

COSTS = StepCosts(base=1.0, per_token=0.1, per_context=0.001, per_pair=0.0001, swap_per_block=0.25)


def decode_plan(step: int, *positions: int, **fields: object) -> IterationPlan:
    """A step of decodes, one at each of the positions."""
    count = len(positions)
    return IterationPlan(
        step=step,
        num_decodes=count,
        request_ids=tuple(RequestId(str(n)) for n in range(count)),
        rows=tuple(range(count)),
        starts=positions,
        counts=(1,) * count,
        samples=(True,) * count,
        **fields,  # type: ignore[arg-type]
    )


def swap(swap_id: int, num_blocks: int, after_step: int = -1, after_swaps: tuple[int, ...] = ()) -> SwapTask:
    blocks = tuple(range(num_blocks))
    return SwapTask(swap_id, RequestId("9"), blocks, blocks, after_step, after_swaps)


def test_the_cost_of_a_step_is_the_sum_for_base_tokens_context_and_pairs() -> None:
    plan = IterationPlan(
        step=0,
        num_decodes=2,
        request_ids=(RequestId("0"), RequestId("1"), RequestId("2")),
        rows=(0, 1, 2),
        starts=(9, 19, 30),
        counts=(1, 1, 4),
        samples=(True, True, False),
    )
    # Contexts 10 + 20 + 34; the prompt's tokens attend over 31 + 32 + 33 + 34 = 130 positions.
    expected = 1.0 + 0.1 * 6 + 0.001 * (10 + 20 + 34) + 0.0001 * (10 + 20 + 130)
    assert COSTS.seconds(plan) == pytest.approx(expected)


def test_the_default_costs_reproduce_the_measured_speeds() -> None:
    for costs, batch, measured in ((ZEN3_SMOLLM2_135M, 1, 2.6e-3), (ZEN3_SMOLLM2_135M, 32, 30e-3)):
        linear_layers = costs.base + batch * costs.per_token
        assert linear_layers == pytest.approx(measured, rel=0.12)
    assert 1060 < 1 / ZEN3_SMOLLM2_135M.per_token < 1420
    assert H200_LLAMA_8B.seconds(decode_plan(0, *[319] * 256)) == pytest.approx(12.0e-3, rel=0.03)
    prompt_token = H200_LLAMA_8B.per_token + H200_LLAMA_8B.per_pair * 1024
    assert 1 / prompt_token == pytest.approx(42_400, rel=0.03)


def test_a_result_advances_the_clock_to_the_end_of_the_step_and_has_a_token_for_every_sample() -> None:
    clock = VirtualClock(now=5.0)
    result = CostModelBackend(clock, COSTS).submit(decode_plan(0, 9, 19)).result()
    assert clock.now == pytest.approx(5.0 + 1.2 + 0.030 + 0.0030)
    assert len(result.tokens) == 2
    assert not result.failed


def test_a_step_submitted_while_another_runs_starts_when_the_other_ends() -> None:
    clock = VirtualClock()
    backend = CostModelBackend(clock, StepCosts(base=1.0, per_token=0.0, per_context=0.0))
    first = backend.submit(decode_plan(0, 9))
    clock.advance(0.4)
    second = backend.submit(decode_plan(1, 10))
    first.result()
    assert clock.now == 1.0
    second.result()
    assert clock.now == 2.0
    clock.advance(0.5)  # the device was idle meanwhile
    backend.submit(decode_plan(2, 11)).result()
    assert clock.now == 3.5
    assert backend.busy_seconds == 3.0


def test_a_result_fetched_late_does_not_turn_the_clock_back() -> None:
    clock = VirtualClock()
    handle = CostModelBackend(clock, COSTS).submit(decode_plan(0, 9))
    clock.advance(100.0)
    handle.result()
    assert clock.now == 100.0


def test_swaps_run_in_parallel_with_steps_one_after_the_other_and_are_reported_once() -> None:
    clock = VirtualClock()
    backend = CostModelBackend(clock, StepCosts(1.0, 0.0, 0.0, swap_per_block=0.25))
    first = backend.submit(decode_plan(0, 9, swap_out=(swap(0, 2), swap(1, 3))))  # they end at 0.5 and 1.25
    assert first.result().finished_swaps == (0,)
    assert clock.now == 1.0
    second = backend.submit(decode_plan(1, 10))
    assert second.result().finished_swaps == (1,)
    assert clock.now == 2.0
    assert backend.submit(decode_plan(2, 11)).result().finished_swaps == ()


def test_a_swap_waits_for_its_step_and_a_step_for_its_swaps() -> None:
    clock = VirtualClock()
    backend = CostModelBackend(clock, StepCosts(1.0, 0.0, 0.0, swap_per_block=0.25))
    first = backend.submit(decode_plan(0, 9))  # from 0 to 1
    second = backend.submit(  # its swap from 1 to 2, so the step from 2 to 3
        decode_plan(1, 10, swap_out=(swap(0, 4, after_step=0),), after_swaps=(0,))
    )
    first.result()
    assert clock.now == 1.0
    assert second.result().finished_swaps == (0,)
    assert clock.now == 3.0


def test_a_plan_without_rows_takes_no_device_time_and_waits_for_the_next_swap() -> None:
    clock = VirtualClock()
    backend = CostModelBackend(clock, StepCosts(1.0, 0.0, 0.0, swap_per_block=0.25))
    handle = backend.submit(decode_plan(0, swap_in=(swap(0, 2), swap(1, 2, after_swaps=(0,)))))
    assert handle.result().finished_swaps == (0,)
    assert clock.now == 0.5
    assert backend.submit(decode_plan(1)).result().finished_swaps == (1,)
    assert clock.now == 1.0
    assert backend.busy_seconds == 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_in_the_engine_takes_the_sum_of_its_steps(overlap: bool) -> None:
    clock = VirtualClock()
    config = ServingEngineConfig(overlap=overlap)
    engine = ServingEngine(CostModelBackend(clock, COSTS), config, clock=clock)
    request_id = engine.submit(InferenceRequest((1, 2, 3, 4), SamplingParams(max_tokens=3)))
    engine.run_until_idle()
    prompt = 1.0 + 0.4 + 0.004 + 0.0001 * (1 + 2 + 3 + 4)
    decodes = 2 * 1.1 + 0.0011 * (5 + 6)
    result = engine.get_result(request_id)
    assert result is not None
    assert result.time_to_first_token == pytest.approx(prompt)
    assert result.total_time == pytest.approx(prompt + decodes)
    assert clock.now == pytest.approx(prompt + decodes)
    engine.stop()


def test_requests_that_are_swapped_for_lack_of_memory_all_end_and_the_run_is_repeatable() -> None:
    def run() -> tuple[float, int]:
        clock = VirtualClock()
        cache = KvCachePoolConfig(num_blocks=8, block_size=4, swap_blocks=64)
        config = ServingEngineConfig(SchedulerConfig(max_running=4), cache)
        # Swapping is cheaper than recompute.
        costs = StepCosts(base=1.0, per_token=0.5, per_context=0.0, swap_per_block=0.01)
        engine = ServingEngine(CostModelBackend(clock, costs), config, clock=clock, seed=1)
        ids = [
            engine.submit(InferenceRequest(tuple(range(n, n + 6)), SamplingParams(max_tokens=16)))
            for n in range(4)
        ]
        engine.run_until_idle()
        results = [engine.get_result(request_id) for request_id in ids]
        assert all(result is not None and len(result.tokens) == 16 for result in results)
        engine.scheduler.check_integrity()
        return clock.now, engine.stats()[0].preemptions_by_swap

    ended_at, swaps = run()
    assert swaps > 0
    assert run() == (ended_at, swaps)
