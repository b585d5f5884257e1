"""One test for each known defect of the published code (15, two tiers, is tested elsewhere)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import (
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.plan import IterationPlan, StepResult, SwapTask
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
    numbered_ids,
)
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.cache.manager import KvCacheManager


class Watched(NoopBackend):
    """The detector backend. Records every plan and advances the clock by each step."""

    def __init__(self, clock: VirtualClock, seconds: float = 0.1, **options: Any) -> None:
        super().__init__(max_context=4096, **options)
        self.plans: list[IterationPlan] = []
        self._clock = clock
        self._seconds = seconds

    def submit(self, plan: IterationPlan) -> Any:
        self.plans.append(plan)
        self._clock.advance(self._seconds)
        return super().submit(plan)


def make(
    blocks: int = 64, backend: Callable[..., Watched] = Watched, **options: Any
) -> tuple[ServingEngine, Watched]:
    clock = VirtualClock()
    backend_options = options.pop("backend_options", {})
    overlap = options.pop("overlap", False)
    watched = backend(clock, **backend_options)
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(**{"max_running": 8, **options}),
        cache=KvCachePoolConfig(num_blocks=blocks, block_size=4),
        overlap=overlap,
    )
    return ServingEngine(watched, config, clock=clock, seed=0, new_id=numbered_ids()), watched


def ask(length: int = 6, max_tokens: int = 6, family: int = 0, **fields: Any) -> InferenceRequest:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return InferenceRequest(tuple(1000 * family + position for position in range(length)), params, **fields)


def alone(engine: ServingEngine, request: InferenceRequest) -> tuple[int, ...]:
    limit = len(request.prompt) + request.params.max_tokens
    return tuple(generate_alone(request.prompt, 1, request.params, limit, engine.scheduler.info))


def result_of(engine: ServingEngine, request_id: RequestId | int) -> GenerationResult:
    result = engine.get_result(RequestId(str(request_id)))
    assert result is not None
    return result


def test_01_the_finish_reason_is_the_cause_even_if_the_length_limit_is_reached_too() -> None:
    engine, _ = make()
    free_run = alone(engine, ask())
    third, last = free_run[2], free_run[5]
    causes = {
        FinishReason.LENGTH: SamplingParams(max_tokens=6, seed=1, ignore_eos=True),
        FinishReason.STOP: SamplingParams(max_tokens=6, seed=1, ignore_eos=True, stop_token_ids=(third,)),
    }
    for cause, params in causes.items():
        request_id = engine.submit(ask(params=params))
        engine.run_until_idle()
        assert result_of(engine, request_id).finish_reason is cause
    at_the_limit = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, stop_token_ids=(last,))
    request_id = engine.submit(ask(params=at_the_limit))
    engine.run_until_idle()
    assert result_of(engine, request_id).finish_reason is FinishReason.STOP, (
        "a stop token at the length limit is a stop"
    )
    with_eos, _ = make(backend_options={"eos_token_ids": frozenset({third})})
    request_id = with_eos.submit(ask(params=SamplingParams(max_tokens=6, seed=1)))
    with_eos.run_until_idle()
    ended = result_of(with_eos, request_id)
    assert ended.finish_reason is FinishReason.END_OF_SEQUENCE and ended.tokens == free_run[:3]


def test_02_each_phase_is_timed_separately_and_none_is_negative() -> None:
    engine, _ = make(max_running=1, max_chunk_tokens=4, prefix_caching=False)
    engine.submit(ask(12, 5))
    engine.submit(ask(12, 5, 1))
    engine.run_until_idle()
    # A step takes 0.1 s: three chunks, then four decodes; the second request waits for all seven.
    first, second = result_of(engine, 0), result_of(engine, 1)
    assert (first.waiting_time, second.waiting_time) == (pytest.approx(0.0), pytest.approx(0.7))
    for result in (first, second):
        assert result.prefill_time == pytest.approx(0.3) and result.decode_time == pytest.approx(0.4)
        assert result.decode_tokens_per_second == pytest.approx(10.0), (
            "the decode speed does not include prefill time"
        )
        assert result.total_time == pytest.approx(result.waiting_time + 0.7)
    assert first.time_to_first_token == pytest.approx(0.3) and second.time_to_first_token == pytest.approx(
        1.0
    )


def test_03_generated_token_k_has_the_position_prompt_length_plus_k() -> None:
    engine, backend = make()
    outputs: list[TokenOutput] = []
    engine.submit_with_callback(ask(6, 5), outputs.append)
    engine.run_until_idle()
    positions = [task.position for plan in backend.plans for task in plan.decode_tasks]
    assert positions == [6, 7, 8, 9], (
        "the token sampled at position 5 is computed at 6, and the last one is never computed"
    )
    assert [output.sequence_length for output in outputs] == [7, 8, 9, 10, 11]


def test_04_empty_and_endless_requests_are_refused_at_submit_with_both_numbers() -> None:
    engine, _ = make(blocks=8)
    for make_bad, numbers in (
        (lambda: ask(0), ["empty", "1"]),
        (lambda: ask(max_tokens=0), ["0", "1"]),
        (lambda: ask(40), ["40", "31"]),
        (lambda: ask(10, max_sequence_length=10), ["10", "9"]),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(make_bad())
        for number in numbers:
            assert number in str(caught.value)
    assert not engine.scheduler.has_work


def test_05_blocks_are_allocated_as_needed_and_not_for_the_longest_possible_answer() -> None:
    engine, _ = make(blocks=64)
    engine.submit(ask(6, 200))
    used = []
    for _ in range(20):
        engine.run_iteration()
        used.append(engine.stats()[1].blocks_used)
    assert used[0] == 2 and used == sorted(used)
    assert used[-1] == -(-(6 + 19) // 4)


def test_06_misuse_of_the_cache_is_an_error_and_nothing_is_lost() -> None:
    cache = KvCacheManager(num_blocks=4, num_rows=2, swap_blocks=4)
    held = cache.allocate(RequestId("1"), BlockCounts(2))
    assert held is not None
    with pytest.raises(ValueError, match="already holds memory"):
        cache.allocate(RequestId("1"), BlockCounts(1))
    out = cache.swap_out(held, after_step=0)
    assert out is not None
    cache.free_row(out[1])
    with pytest.raises(ValueError, match="cannot be extended"):
        cache.extend(held, BlockCounts(1))
    other = cache.allocate(RequestId("2"), BlockCounts(3))
    assert other is not None
    assert cache.swap_in(held, after_step=0) is None and cache.is_swapped(RequestId("1")), (
        "without free blocks the swapped copy stays"
    )
    assert cache.free(held) is None, "its row was freed by the swap-out"
    with pytest.raises(ValueError, match="released already"):
        cache.free(held)
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.rows_used, stats.blocks_used, stats.swap_blocks_used) == (1, 3, 0)


def test_07_generated_tokens_are_read_through_the_block_table() -> None:
    class Crossed(Watched):
        """Swaps the first two blocks of every block table."""

        def submit(self, plan: IterationPlan) -> Any:
            starts = tuple(
                s._replace(blocks=(s.blocks[1], s.blocks[0], *s.blocks[2:])) for s in plan.row_starts
            )
            swapped = {f: getattr(plan, f) for f in plan.__dataclass_fields__}
            return super().submit(IterationPlan(**{**swapped, "row_starts": starts}))

    class Overlaid(Watched):
        """Gives all rows the same blocks."""

        def submit(self, plan: IterationPlan) -> Any:
            starts = tuple(s._replace(blocks=tuple(range(len(s.blocks)))) for s in plan.row_starts)
            same = {f: getattr(plan, f) for f in plan.__dataclass_fields__}
            return super().submit(IterationPlan(**{**same, "row_starts": starts}))

    outputs = []
    for kind in (Watched, Crossed, Overlaid):
        engine, _ = make(backend=kind, prefix_caching=False)
        for family in range(3):
            engine.submit(ask(7, 4, family))
        engine.run_until_idle()
        outputs.append([result_of(engine, family).tokens for family in range(3)])
    right = [alone(engine, ask(7, 4, family)) for family in range(3)]
    # A consistent permutation of the blocks gives the same tokens. Blocks shared by different sequences do not.
    assert outputs[0] == right and outputs[1] == right and outputs[2] != right


def test_08_all_phases_share_one_budget_and_decodes_rotate() -> None:
    engine, backend = make(
        max_tokens_per_step=8, max_prefill_tokens=6, max_sequences_per_step=3, max_running=8
    )
    for family in range(6):
        engine.submit(ask(9, 12, family))
    engine.run_until_idle()
    for plan in backend.plans:
        assert plan.num_tokens <= 8 and len(plan.rows) <= 3
        assert sum(task.num_tokens for task in plan.prefill_tasks) <= 6
    for start in range(len(backend.plans) - 12):
        window = backend.plans[start : start + 6]
        alive = set(window[0].request_ids) & {
            rid for plan in backend.plans[start + 6 :] for rid in plan.request_ids
        }
        seen = {rid for plan in window[1:] for rid in plan.request_ids}
        assert alive <= seen, "a running sequence was not scheduled for six steps"


def test_08_progress_is_applied_only_after_the_step_has_succeeded() -> None:
    engine, backend = make()
    request_id = engine.submit(ask())
    plan = engine.scheduler.schedule()
    assert plan is not None
    sequence = engine.scheduler.sequences[request_id]
    assert sequence.computed == 0 and sequence.generated == []
    handle = backend.submit(plan)
    assert sequence.computed == 0
    engine.scheduler.apply(plan, handle.result())
    assert sequence.computed == 6 and len(sequence.generated) == 1


def test_09_the_last_chunk_samples_the_first_token() -> None:
    engine, backend = make(max_chunk_tokens=4)
    engine.submit(ask(10, 1))
    engine.run_until_idle()
    entries = [(t.start, t.num_tokens, t.samples) for plan in backend.plans for t in plan.prefill_tasks]
    assert entries == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert not any(plan.num_decodes for plan in backend.plans), "no token is computed twice"
    assert result_of(engine, 0).tokens == alone(engine, ask(10, 1))


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("ageing_rate", [0.0, 1000.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_10_a_preempted_request_resumes_after_the_request_that_preempted_it(
    mode: PreemptionMode, ageing_rate: float, overlap: bool
) -> None:
    engine, backend = make(
        blocks=8,
        overlap=overlap,
        policy=PriorityPolicy.PRIORITY,
        ageing_rate=ageing_rate,
        preemption=mode,
        max_running=2,
        prefix_caching=False,
    )
    engine.submit(ask(12, 12, priority=Priority.LOW))
    for _ in range(3):
        engine.run_iteration()
    engine.submit(ask(24, 4, 1, priority=Priority.HIGH))
    engine.run_until_idle()
    victims = [plan for plan in backend.plans if "0" in plan.preempted]
    assert len(victims) == 1, "preempted once, not repeatedly"
    assert "0" not in victims[0].request_ids, "its entry is removed from the plan"
    steps_of_high = [plan.step for plan in backend.plans if "1" in plan.request_ids]
    back = [plan.step for plan in backend.plans if "0" in plan.request_ids and plan.step > victims[0].step]
    assert steps_of_high[0] <= victims[0].step + 1 + overlap and back[0] > steps_of_high[0]
    for family, request in enumerate((ask(12, 12), ask(24, 4, 1))):
        assert result_of(engine, family).tokens == alone(engine, request)


@pytest.mark.parametrize("ageing_rate", [0.0, 1000.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_10_a_request_of_higher_priority_gets_a_row_even_if_all_rows_are_decoding(
    overlap: bool, ageing_rate: float
) -> None:
    engine, backend = make(
        policy=PriorityPolicy.PRIORITY, ageing_rate=ageing_rate, max_running=2, overlap=overlap
    )
    for family in range(2):
        engine.submit(ask(6, 60, family, priority=Priority.LOW))
    for _ in range(5):
        engine.run_iteration()
    high = engine.submit(ask(6, 5, 2, priority=Priority.HIGH))
    for _ in range(12):
        engine.run_iteration()
    assert engine.is_complete(high), "it waits for no request of lower priority"
    engine.run_until_idle()
    assert sum(len(plan.preempted) for plan in backend.plans) == 1
    for family, request in enumerate((ask(6, 60), ask(6, 60, 1), ask(6, 5, 2))):
        assert result_of(engine, family).tokens == alone(engine, request)


def test_10_a_request_with_its_last_token_in_flight_is_not_preempted() -> None:
    engine, backend = make(
        policy=PriorityPolicy.PRIORITY, max_running=1, overlap=True, preemption=PreemptionMode.SWAP
    )
    engine.submit(ask(6, 3, priority=Priority.LOW))
    while len(engine.scheduler.sequences[RequestId("0")].generated) < 2:
        engine.run_iteration()
    engine.submit(ask(6, 3, 1, priority=Priority.HIGH))
    engine.run_until_idle()
    assert not any(plan.preempted for plan in backend.plans)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 63, 64, 65, 250])
def test_11_prompts_of_every_length_are_computed_completely(length: int) -> None:
    engine, backend = make(blocks=80, max_tokens_per_step=16, max_prefill_tokens=8, max_chunk_tokens=8)
    engine.submit(ask(length, 3))
    engine.run_until_idle()
    assert sum(task.num_tokens for plan in backend.plans for task in plan.prefill_tasks) == length
    assert result_of(engine, 0).tokens == alone(engine, ask(length, 3))


def test_12_a_request_that_can_never_fit_is_refused_and_does_not_block_the_queue() -> None:
    engine, _ = make(blocks=4)
    engine.submit(ask(6, 4))
    with pytest.raises(InvalidRequestError, match=r"prompt has 16 tokens; allowed: at most 15"):
        engine.submit(ask(16, 1, 1))
    next_in_queue = engine.submit(ask(6, 4, 2))
    engine.run_until_idle()
    assert result_of(engine, next_in_queue).state is RequestState.COMPLETED


def test_12_an_answer_ends_by_length_when_the_cache_is_full() -> None:
    engine, _ = make(blocks=4)
    request_id = engine.submit(ask(6, 1000))
    engine.run_until_idle()
    result = result_of(engine, request_id)
    assert result.finish_reason is FinishReason.LENGTH and len(result.tokens) == 10


def test_13_cancel_stops_the_work_frees_memory_and_gives_a_result() -> None:
    engine, backend = make()
    received: list[TokenOutput] = []
    request_id = engine.submit_with_callback(ask(6, 500), received.append)
    for _ in range(5):
        engine.run_iteration()
    assert engine.cancel(request_id)
    steps = len(backend.plans)
    engine.run_until_idle()
    assert len(backend.plans) == steps, "no further step computes it"
    assert received[-1].is_final and received[-1].finish_reason is FinishReason.CANCELLED
    assert result_of(engine, request_id).tokens == alone(engine, ask(6, 500))[:5]
    assert engine.stats()[1].blocks_used == engine.stats()[1].rows_used == 0


def test_14_the_error_of_one_request_stops_neither_the_loop_nor_another_request() -> None:
    class OneIsBad:
        def at_submit(self, plan: IterationPlan) -> str | None:
            return None

        def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
            return None, (
                {RequestId("1"): Failure(FailureKind.STEP, "not a number")} if "1" in plan.request_ids else {}
            )

        def at_wait(self, plan: IterationPlan) -> str | None:
            return None

        def at_swap(self, task: SwapTask) -> str | None:
            return None

    engine, _ = make(backend_options={"faults": OneIsBad()})
    for family in range(3):
        engine.submit(ask(family=family))
    engine.run_until_idle()
    assert result_of(engine, 1).state is RequestState.FAILED and result_of(engine, 1).error == "not a number"
    for family in (0, 2):
        assert result_of(engine, family).tokens == alone(engine, ask(family=family))
    later = engine.submit(ask(family=5))
    engine.run_until_idle()
    assert result_of(engine, later).state is RequestState.COMPLETED


def test_14_latencies_are_measured() -> None:
    engine, _ = make()
    engine.submit(ask(6, 11))
    engine.run_until_idle()
    metrics = engine.metrics()
    assert metrics.latency.p50 == pytest.approx(1.1, rel=0.05) == metrics.latency.largest
    assert metrics.time_to_first_token.p99 == pytest.approx(0.1, rel=0.05)
    assert metrics.inter_token_latency.mean == pytest.approx(0.1)
    assert metrics.inter_token_latency.count == 10


def test_16_the_detector_finds_a_wrong_block_a_wrong_position_and_a_lost_swap() -> None:
    """Checks the tests themselves: with these defects a run must fail."""

    def spoil(change: Callable[[IterationPlan], dict[str, Any]]) -> type[Watched]:
        class Spoiled(Watched):
            def submit(self, plan: IterationPlan) -> Any:
                fields = {f: getattr(plan, f) for f in plan.__dataclass_fields__}
                return super().submit(IterationPlan(**{**fields, **change(plan)}))

        return Spoiled

    def wrong_block(plan: IterationPlan) -> dict[str, Any]:
        return {"table_blocks": tuple(0 for _ in plan.table_blocks)}

    def wrong_position(plan: IterationPlan) -> dict[str, Any]:
        return {"starts": tuple(start + (start > 8) for start in plan.starts)}

    def lost_swap(plan: IterationPlan) -> dict[str, Any]:
        return {"swap_in": tuple(t._replace(swap_slots=t.swap_slots[::-1]) for t in plan.swap_in)}

    right = None
    for change in (lambda plan: {}, wrong_block, wrong_position, lost_swap):
        engine, _ = make(
            blocks=12, backend=spoil(change), preemption=PreemptionMode.SWAP, prefix_caching=False
        )
        for family in range(3):
            engine.submit(ask(10, 20, family))
        engine.run_until_idle()
        tokens = [result_of(engine, family).tokens for family in range(3)]
        if right is None:
            right = [alone(engine, ask(10, 20, family)) for family in range(3)]
            assert tokens == right and engine.stats()[0].preemptions_by_swap > 0
        else:
            assert tokens != right


def test_16_a_step_result_says_whether_it_failed() -> None:
    assert not StepResult().failed
    assert (
        StepResult(error="x").failed
        and StepResult(errors={RequestId("1"): Failure(FailureKind.STEP, "x")}).failed
    )
