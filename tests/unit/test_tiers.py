"""The two-tier cache without a device: arithmetic, options, scheduling, prefix hits and metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weft.backends.cost_model import CostModelBackend
from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
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
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo, IterationPlan
from weft.request import GenerationResult, InferenceRequest, Priority, RequestId, SamplingParams
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence
from weft.tiers import (
    PoolSizes,
    choose_sizes,
    longest_context,
    longest_sequence,
    split_memory,
    store_vector_bytes,
    stored_blocks,
)

BLOCK = 4


def two_tier(full: int = 8, store: int = 16, tail_blocks: int = 1, **others: Any) -> KvCachePoolConfig:
    return KvCachePoolConfig(
        num_blocks=full,
        block_size=BLOCK,
        kv_cache=KvCacheKind.TWO_TIER,
        tail_length=tail_blocks * BLOCK,
        store_blocks=store,
        **others,
    )


def request(prompt: tuple[int, ...], max_tokens: int = 4, **others: Any) -> InferenceRequest:
    return InferenceRequest(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **others)


class Run:
    """A scheduler on the noop backend, run step by step."""

    def __init__(self, cache: KvCachePoolConfig, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig(max_running=8)
        self.backend = NoopBackend(vocabulary_size=1000)
        self.info = self.backend.allocate(cache, self.config.max_running)
        self.scheduler = ContinuousBatchScheduler(self.config, self.info, VirtualClock())
        self.sequences: list[Sequence] = []
        self.plans: list[IterationPlan] = []
        self.results: dict[RequestId, GenerationResult] = {}

    def add(self, new: InferenceRequest) -> Sequence:
        sequence = Sequence(new.replaced(request_id=RequestId(str(len(self.sequences)))), seed=0)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> IterationPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.scheduler.apply(plan, self.backend.submit(plan).result())
            self.scheduler.check_integrity()
            _, results = self.scheduler.take_outputs()
            self.results.update({result.request_id: result for result in results})
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            assert self.step() is not None, "requests are left and no step is planned"
        for sequence in self.sequences:
            alone = generate_alone(
                sequence.request.prompt, sequence.seed, sequence.request.params, sequence.limit, self.info
            )
            assert list(self.results[sequence.request_id].tokens) == alone


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(("block_size", "tail_blocks"), [(1, 1), (1, 3), (4, 1), (4, 2), (16, 16)])
def test_a_position_reads_from_the_store_the_blocks_that_end_a_tail_before_it(
    block_size: int, tail_blocks: int
) -> None:
    tail = block_size * tail_blocks
    for position in range(6 * tail):
        in_store = [i for i in range(position + 1) if (i + 1) * block_size + tail <= position + 1]
        assert stored_blocks(position, block_size, tail_blocks) == len(in_store)


def test_sequences_of_the_expected_length_fill_both_tiers_at_the_same_time() -> None:
    sizes = split_memory(
        1 << 20,
        block_bytes=128,
        store_block_bytes=66,
        block_size=16,
        tail_blocks=16,
        expected_context=4096,
        step_tokens=2048,
    )
    assert sizes.full * 128 + sizes.store * 66 <= 1 << 20 < sizes.full * 128 + (sizes.store + 1) * 66
    prompts = 8192 // 256
    assert abs((sizes.full - prompts) / 17 - sizes.store / 240) < 0.1


def test_less_memory_than_a_tail_and_two_store_blocks_is_rejected() -> None:
    def split(memory: int) -> PoolSizes:
        return split_memory(
            memory,
            block_bytes=100,
            store_block_bytes=30,
            block_size=16,
            tail_blocks=2,
            expected_context=64,
            step_tokens=512,
        )

    assert split(460) == (4, 2)
    with pytest.raises(InvalidRequestError, match=r"459 bytes.*takes 460"):
        split(459)


def test_configured_sizes_are_used_and_limit_the_context() -> None:
    pool = two_tier(full=5, store=7, tail_blocks=2)
    sizes = choose_sizes(
        pool, block_bytes=1, store_block_bytes=1, free_memory=0, model_context=999, step_tokens=0
    )
    assert (
        sizes == (5, 7)
        and longest_context(999, sizes, BLOCK, 2) == 36
        and longest_context(30, sizes, BLOCK, 2) == 30
    )


def test_fewer_full_blocks_than_a_tail_needs_are_rejected() -> None:
    info = BackendInfo(10, 99, 3, BLOCK, 0, 0, store_blocks=4, tail_blocks=2)
    with pytest.raises(InvalidRequestError, match=r"has 3 full blocks.*needs at least 4"):
        longest_sequence(info)


def test_a_head_of_odd_size_is_rejected_with_4_bits() -> None:
    assert (
        store_vector_bytes(64, 8) == 66
        and store_vector_bytes(64, 4) == 34
        and store_vector_bytes(63, 8) == 65
    )
    with pytest.raises(InvalidRequestError, match="heads have 63 values"):
        store_vector_bytes(63, 4)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail_length": 20}, "tail_length is 20 and block_size 16"),
        ({"tail_length": 0}, "tail_length is 0; allowed: at least 1"),
        ({"store_bits": 6}, "store_bits is 6; allowed: 8, 4"),
        ({"num_blocks": 40}, "num_blocks is 40 and store_blocks None"),
        ({"store_blocks": 40}, "num_blocks is None and store_blocks 40"),
        ({"num_blocks": 17, "store_blocks": 4}, "num_blocks is 17; a tail of 256 tokens needs at least 18"),
        ({"expected_context": 0}, "expected_context is 0"),
        ({"kv_cache": KvCacheKind.FULL, "store_blocks": 4}, "kv_cache is 'full' and has no store"),
        ({"kv_cache": "two-tier"}, "kv_cache is 'two-tier'; allowed: KvCacheKind.FULL, KvCacheKind.TWO_TIER"),
    ],
)
def test_options_that_contradict_each_other_are_rejected_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        KvCachePoolConfig(**({"kv_cache": KvCacheKind.TWO_TIER} | options))


def test_a_one_tier_cache_may_have_any_block_size() -> None:
    assert KvCachePoolConfig(block_size=24).tail_blocks == 0
    assert KvCachePoolConfig(kv_cache=KvCacheKind.TWO_TIER).tail_blocks == 16


# ---------------------------------------------------------------------- plans


def test_blocks_move_when_they_leave_the_tail_and_not_before() -> None:
    run = Run(two_tier())
    run.add(request((1, 2, 3, 4, 5, 6), max_tokens=12))
    run.finish()
    moved = {start: plan.moved_indices for plan in run.plans for start in plan.starts if plan.moved_indices}
    assert moved == {7: (0,), 11: (1,), 15: (2,)}, "the first positions that read them from the store"


def test_a_chunk_longer_than_the_tail_moves_blocks_that_it_writes() -> None:
    run = Run(two_tier())
    run.add(request(tuple(range(20)), max_tokens=2))
    first = run.step()
    assert first is not None and first.counts == (20,) and first.moved_indices == (0, 1, 2, 3)
    assert first.moved_from == first.row_starts[0].blocks[:4], "the row start has the full blocks"
    run.finish()


def test_content_that_two_requests_of_one_step_move_is_moved_once() -> None:
    run = Run(two_tier(full=16))
    run.add(request(tuple(range(20)), max_tokens=2))
    run.add(request(tuple(range(20)), max_tokens=2))
    plan = run.step()
    assert plan is not None and len(plan.rows) == 2
    first, second = plan.moved_to[:4], plan.moved_to[4:]
    assert second == first[: len(second)] and set(plan.moved_from[4:]) == {-1}
    run.finish()


def test_with_full_blocks_for_one_tail_a_long_prompt_is_computed_in_small_chunks() -> None:
    run = Run(two_tier(full=3, store=30))
    run.add(request(tuple(range(90)), max_tokens=3))
    run.finish()
    assert max(count for plan in run.plans for count in plan.counts) <= 3 * BLOCK
    assert run.scheduler.stats.preemptions_by_recompute == 0


def test_prompts_in_progress_wait_for_each_other_instead_of_being_preempted() -> None:
    run = Run(two_tier(full=8, store=60, swap_blocks=0))
    for number in range(3):
        run.add(request(tuple(range(100 * number, 100 * number + 60)), max_tokens=8))
    run.finish()
    stats = run.scheduler.stats
    assert (stats.preemptions_by_recompute, stats.preemptions_by_swap) == (0, 0)


def test_growing_answers_never_run_out_of_full_blocks() -> None:
    run = Run(two_tier(full=8, store=60))
    for number in range(3):
        run.add(request((100 * number, 100 * number + 1), max_tokens=24))
    run.finish()
    stats = run.scheduler.stats
    assert (stats.preemptions_by_recompute, stats.preemptions_by_swap) == (0, 0)


def test_a_preempted_request_holds_blocks_of_the_tier_that_is_short() -> None:
    """The store is full, and the newest request has no store blocks: the one before it is preempted."""
    run = Run(two_tier(full=20, store=6, swap_blocks=0))
    for length in (14, 14, 1):
        first = 100 * len(run.sequences)
        run.add(request(tuple(range(first, first + length)), max_tokens=12))
    while not any(plan.preempted for plan in run.plans):
        assert run.step() is not None
    assert run.plans[-1].preempted == ("1",)
    run.finish()


def test_swaps_copy_the_blocks_of_both_tiers() -> None:
    run = Run(two_tier(full=12, store=9), SchedulerConfig(max_running=4, preemption=PreemptionMode.SWAP))
    for number in range(3):
        run.add(request((100 * number, 100 * number + 1), max_tokens=24))
    run.finish()
    swaps = [task for plan in run.plans for task in (*plan.swap_out, *plan.swap_in)]
    assert swaps, "nothing was swapped"
    for task in swaps:
        in_store = [block >= run.info.num_blocks for block in task.blocks]
        assert any(in_store) and in_store == [slot >= run.info.swap_blocks for slot in task.swap_slots]


# ---------------------------------------------------------------------- prefix hits


def start_of(run: Run, prompt: tuple[int, ...]) -> IterationPlan:
    """The step in which a request with this prompt starts."""
    sequence = run.add(request(prompt, max_tokens=2))
    while True:
        plan = run.step()
        assert plan is not None
        if sequence.request_id in plan.request_ids:
            return plan


def test_a_prefix_hit_uses_store_blocks_before_the_tail_and_full_blocks_in_it() -> None:
    run = Run(two_tier())
    run.add(request(tuple(range(20)), max_tokens=2))
    run.finish()
    plan = start_of(run, (*range(20), 900))
    blocks = plan.row_starts[0].blocks
    assert plan.starts == (20,) and [block >= 8 for block in blocks] == [True] * 4 + [False] * 2
    assert plan.moved_to == ()
    run.finish()


def test_a_shorter_prefix_is_no_hit_once_its_tail_is_evicted() -> None:
    run = Run(two_tier(full=3, store=30))
    run.add(request(tuple(range(60)), max_tokens=2))
    run.finish()
    assert start_of(run, (*range(20), 900)).starts == (0,)
    run.finish()


def test_full_blocks_that_a_lookup_missed_stay_cached_once_computed_again() -> None:
    run = Run(two_tier(full=8, store=60))
    shared = tuple(range(20))
    for others in (100, 200, 300, 400):
        run.add(request((*shared, *range(others, others + 30)), max_tokens=2))
        run.finish()
    starts = [plan.starts for plan in run.plans if plan.row_starts]
    # The second finds part of the prefix, and computes the rest again. That rest stays cached for the others.
    assert starts == [(0,), (8,), (20,), (20,)]


def test_content_evicted_from_the_store_is_hit_in_full_blocks_and_moved_again() -> None:
    run = Run(two_tier(full=16))
    run.add(request(tuple(range(20)), max_tokens=2))
    run.finish()
    store = run.scheduler.kv_cache.store
    taken = store.allocate(store.num_blocks)
    assert taken is not None
    store.release(taken)
    plan = start_of(run, (*range(20), 900))
    assert plan.starts == (20,) and plan.moved_indices == (0, 1, 2, 3)
    assert plan.moved_from == plan.row_starts[0].blocks[:4]
    run.finish()


def test_a_prefix_hit_leaves_one_full_block_to_continue() -> None:
    """All full blocks hold the prefix, and the store does not: a hit on all of them would block itself."""
    run = Run(two_tier(full=6, store=30))
    run.add(request(tuple(range(24)), max_tokens=1))
    while run.scheduler.has_work:
        run.step()
    pool, store = run.scheduler.kv_cache.pool, run.scheduler.kv_cache.store
    taken = store.allocate(store.num_blocks)
    assert taken is not None
    store.release(taken)
    assert all(pool.is_cached(block) for block in range(6))
    plan = start_of(run, (*range(24), 900, 901))
    assert plan.starts == (20,)
    run.finish()


def test_the_next_request_of_a_session_hits_its_store_blocks_and_its_tail() -> None:
    run = Run(two_tier(full=11, store=20))
    run.add(request(tuple(range(20)), max_tokens=2, session_id="talk"))
    run.finish()
    for number in range(4):
        run.add(request(tuple(range(100 * number, 100 * number + 30)), max_tokens=2))
        run.finish()
    assert start_of(run, (*range(20), 900)).starts == (20,)
    run.finish()


# ---------------------------------------------------------------------- capacity and metrics


def max_running_contexts(cache: KvCachePoolConfig) -> int:
    """How many contexts of 4,096 tokens run at once, in the memory for 16 of them with one tier, without preemptions."""
    clock = VirtualClock()
    backend = CostModelBackend(clock)
    info = backend.allocate(cache, 256, 2048)
    scheduler = ContinuousBatchScheduler(SchedulerConfig(prefix_caching=False), info, clock)
    for number in range(60):
        prompt = tuple(range(number, number + 3840))
        scheduler.add(
            Sequence(request(prompt, max_tokens=256).replaced(request_id=RequestId(str(number))), 0)
        )
    max_running = 0
    while scheduler.stats.tokens_generated < 60 * 128:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(plan, backend.submit(plan).result())
        max_running = max(max_running, len(scheduler.running))
    assert scheduler.stats.preemptions_by_recompute + scheduler.stats.preemptions_by_swap == 0
    return max_running


def test_two_tiers_hold_1_8_times_as_many_contexts_and_3_times_with_4_bits() -> None:
    tiers = KvCachePoolConfig(kv_cache=KvCacheKind.TWO_TIER, swap_blocks=0)
    assert max_running_contexts(KvCachePoolConfig(num_blocks=4096, swap_blocks=0)) == 16
    assert max_running_contexts(tiers) >= 1.8 * 16
    assert max_running_contexts(dataclasses.replace(tiers, store_bits=4)) >= 3 * 16


def test_metrics_report_the_use_of_each_tier_and_the_moves() -> None:
    engine = ServingEngine(
        NoopBackend(vocabulary_size=1000),
        ServingEngineConfig(cache=two_tier(), overlap=False),
        clock=VirtualClock(),
    )
    empty = engine.metrics().two_tier
    assert empty is not None and empty.compression_ratio == 1.0 and empty.migrations == 0
    engine.submit(request(tuple(range(20)), max_tokens=3))
    engine.run_iteration()
    figures = engine.metrics().two_tier
    assert figures is not None
    # Five blocks of 32 bytes. Four moved to 16 bytes each. The step has ended, so each is in one tier only.
    assert (figures.tail_tokens, figures.store_tokens) == (4, 16)
    assert (figures.tail_bytes, figures.store_bytes) == (32, 64)
    assert figures.compression_ratio == pytest.approx(5 * 32 / 96)
    assert (figures.migrations, figures.migrations_shared) == (4, 0)
    engine.submit(request(tuple(range(20)), max_tokens=3, cache_salt="another"))
    engine.run_until_idle()
    after = engine.metrics()
    assert after.two_tier is not None and after.two_tier.migrations == 8 and after.cache_utilisation == 0


def test_a_one_tier_cache_has_no_tier_metrics() -> None:
    engine = ServingEngine(NoopBackend(), ServingEngineConfig(), clock=VirtualClock())
    assert engine.metrics().two_tier is None


# ---------------------------------------------------------------------- regressions


def test_a_swap_out_does_not_copy_blocks_that_were_adopted_in_the_same_plan() -> None:
    """The copy runs before the step that fills the adopted block, so it would hold old content."""
    cache = KvCachePoolConfig(num_blocks=7, block_size=2, swap_blocks=50)
    config = SchedulerConfig(
        policy=PriorityPolicy.PRIORITY,
        max_running=8,
        max_tokens_per_step=16,
        max_prefill_tokens=8,
        max_chunk_tokens=2,
        preemption=PreemptionMode.SWAP,
        ageing_rate=0.0,
    )
    run, shared = Run(cache, config), tuple(range(1, 11))
    arrivals = {
        0: [request((*shared, 50, 51), 2)],
        3: [
            request((200, 201, 202, 203), 3, priority=Priority.CRITICAL),
            request((300, 301, 302, 303, 304), 2, priority=Priority.CRITICAL),
        ],
        4: [request((*shared, 60, 61), 2, priority=Priority.HIGH)],
    }
    for step in range(5):
        for new in arrivals.get(step, ()):
            run.add(new)
        run.step()
    run.finish()
