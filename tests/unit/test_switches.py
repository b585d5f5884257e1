"""Every switch of the scheduler has its effect: the plans of equal requests with and without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PreemptionMode, PriorityPolicy, SchedulerConfig
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo, IterationPlan
from weft.request import GenerationResult, InferenceRequest, Priority, RequestId, RequestState, SamplingParams
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence


class Harness:
    """A scheduler on the noop backend, run step by step. Keeps every plan."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        swap_blocks: int = 256,
        costs: tuple[float, float] = (1e-4, 1e-4),
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.backend = NoopBackend(
            max_context=512, recompute_seconds_per_token=costs[0], swap_seconds_per_block=costs[1]
        )
        config = SchedulerConfig(**{"max_running": 8, **options})
        pool = KvCachePoolConfig(num_blocks, block_size, swap_blocks)
        self.info: BackendInfo = self.backend.allocate(pool, config.max_running)
        self.scheduler = ContinuousBatchScheduler(config, self.info, self.clock)
        self.plans: list[IterationPlan] = []
        self.results: dict[RequestId, GenerationResult] = {}
        self.sequences: list[Sequence] = []

    def add(self, prompt: Iterable[int], max_tokens: int = 4, **fields: Any) -> Sequence:
        params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = RequestId(str(len(self.sequences)))
        sequence = Sequence(InferenceRequest(tuple(prompt), params, request_id=request_id, **fields), seed=3)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> IterationPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.clock.advance(0.01)
            self.scheduler.apply(plan, self.backend.submit(plan).result(), 0.01)
        self.scheduler.check_integrity()
        self.results.update((result.request_id, result) for result in self.scheduler.take_outputs()[1])
        return plan

    def run(self, max_steps: int = 2000) -> Harness:
        while self.scheduler.has_work:
            max_steps -= 1
            assert max_steps, "some requests never end"
            self.step()
        for sequence in self.sequences:
            request = sequence.request
            expected = generate_alone(
                request.prompt, sequence.seed, request.params, sequence.limit, self.info
            )
            assert list(self.results[sequence.request_id].tokens) == expected
        return self

    def computed(self, number: int) -> list[int]:
        """The sizes of the prefill chunks of one request."""
        return [
            t.num_tokens for plan in self.plans for t in plan.prefill_tasks if t.request_id == str(number)
        ]


def prompt_of(length: int, family: int = 0) -> list[int]:
    return [1000 * family + position for position in range(length)]


# ---------------------------------------------------------------------- shape of a step


def test_chunked_prefill_on_splits_a_prompt_into_chunks_of_the_configured_size() -> None:
    harness = Harness(max_chunk_tokens=16, max_prefill_tokens=64, max_tokens_per_step=64)
    harness.add(prompt_of(50))
    assert harness.run().computed(0) == [16, 16, 16, 2]


def test_chunked_prefill_off_computes_every_prompt_in_one_step() -> None:
    harness = Harness(
        chunked_prefill=False, max_chunk_tokens=16, max_prefill_tokens=64, max_tokens_per_step=72
    )
    for family in range(5):
        harness.add(prompt_of(50, family))
    harness.run()
    assert [harness.computed(number) for number in range(5)] == [[50]] * 5
    assert all(plan.num_prefills <= 1 for plan in harness.plans), (
        "two prompts of 50 tokens do not fit into 64"
    )


def test_chunked_prefill_off_rejects_a_prompt_longer_than_a_step_with_both_numbers() -> None:
    harness = Harness(chunked_prefill=False, max_prefill_tokens=64, max_tokens_per_step=72)
    with pytest.raises(InvalidRequestError, match=r"prompt has 65 tokens; allowed: at most 64"):
        harness.add(prompt_of(65))
    harness.add(prompt_of(64))
    assert harness.run().computed(0) == [64]


@pytest.mark.parametrize("pure", [True, False])
def test_prefer_pure_decode_never_mixes_prompts_with_decodes(pure: bool) -> None:
    harness = Harness(
        prefer_pure_decode=pure, max_chunk_tokens=8, max_prefill_tokens=8, max_tokens_per_step=64
    )
    harness.add(prompt_of(4), max_tokens=20)
    for _ in range(3):
        harness.step()
    harness.add(prompt_of(40, 1), max_tokens=5)
    harness.run()
    mixed = [plan for plan in harness.plans if plan.num_decodes and plan.num_prefills]
    assert bool(mixed) is not pure


def test_pure_decode_alternates_so_that_neither_prompts_nor_decodes_starve() -> None:
    harness = Harness(
        prefer_pure_decode=True, max_chunk_tokens=8, max_prefill_tokens=8, max_tokens_per_step=64
    )
    harness.add(prompt_of(4), max_tokens=30)
    harness.step()
    harness.add(prompt_of(40, 1), max_tokens=5)
    kinds = [
        "decode" if plan.num_decodes else "prefill" for plan in (harness.step() for _ in range(8)) if plan
    ]
    assert kinds == ["decode", "prefill"] * 4


@pytest.mark.parametrize("dynamic", [True, False])
def test_requests_join_a_running_batch_only_with_dynamic_batching(
    dynamic: bool,
) -> None:
    harness = Harness(dynamic_batching=dynamic)
    harness.add(prompt_of(4), max_tokens=10)
    harness.step()
    harness.add(prompt_of(4, 1), max_tokens=10)
    harness.run()
    last_of_first = max(number for number, plan in enumerate(harness.plans) if "0" in plan.request_ids)
    first_of_second = min(number for number, plan in enumerate(harness.plans) if "1" in plan.request_ids)
    assert (first_of_second <= last_of_first) is dynamic


def test_without_dynamic_batching_requests_that_wait_together_still_form_one_batch() -> None:
    harness = Harness(dynamic_batching=False)
    for family in range(3):
        harness.add(prompt_of(4, family), max_tokens=5)
    first = harness.step()
    assert first is not None and first.request_ids == ("0", "1", "2")
    harness.run()


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_no_step_holds_more_sequences_than_configured_and_all_of_them_run(limit: int | None) -> None:
    harness = Harness(max_sequences_per_step=limit)
    for family in range(6):
        harness.add(prompt_of(4, family), max_tokens=8)
    harness.run()
    assert max(len(plan.rows) for plan in harness.plans) == (limit or 6)


def test_sequences_that_do_not_fit_one_step_advance_evenly() -> None:
    harness = Harness(max_sequences_per_step=2)
    for family in range(5):
        harness.add(prompt_of(4, family), max_tokens=40)
    while not all(sequence.generated for sequence in harness.sequences):
        harness.step()
    seen: Counter[RequestId] = Counter()
    for _ in range(20):
        plan = harness.step()
        assert plan is not None
        seen.update(plan.request_ids)
    assert sum(seen.values()) == 40 and set(seen.values()) == {8}


def test_the_prefill_cap_holds_below_the_token_budget() -> None:
    harness = Harness(max_prefill_tokens=10, max_tokens_per_step=100, max_chunk_tokens=100)
    for family in range(4):
        harness.add(prompt_of(30, family))
    harness.run()
    spent = [sum(task.num_tokens for task in plan.prefill_tasks) for plan in harness.plans]
    assert max(spent) == 10


# ---------------------------------------------------------------------- preemption


def crowd(harness: Harness) -> None:
    """Runs two requests that fit into memory together only at first."""
    harness.add(prompt_of(12), max_tokens=20)
    harness.add(prompt_of(12, 1), max_tokens=20)
    harness.run()


@pytest.mark.parametrize(
    ("mode", "costs", "swap_blocks", "swaps"),
    [
        (PreemptionMode.SWAP, (1e-9, 1.0), 64, True),
        (PreemptionMode.RECOMPUTE, (1.0, 1e-9), 64, False),
        (PreemptionMode.AUTO, (1.0, 1e-9), 64, True),
        (PreemptionMode.AUTO, (1e-9, 1.0), 64, False),
        (PreemptionMode.SWAP, (1.0, 1e-9), 0, False),
        (PreemptionMode.SWAP, (1.0, 1e-9), 2, False),
    ],
    ids=[
        "swap",
        "recompute",
        "auto: swap is cheaper",
        "auto: recompute is cheaper",
        "no swap slots",
        "too few swap slots",
    ],
)
def test_the_preemption_mode_decides_between_swap_and_recompute(
    mode: PreemptionMode, costs: tuple[float, float], swap_blocks: int, swaps: bool
) -> None:
    harness = Harness(
        num_blocks=12, swap_blocks=swap_blocks, preemption=mode, costs=costs, prefix_caching=False
    )
    crowd(harness)
    stats = harness.scheduler.stats
    assert stats.preemptions_by_swap + stats.preemptions_by_recompute > 0, "no request was preempted"
    assert bool(stats.preemptions_by_swap) is swaps
    assert bool(stats.preemptions_by_recompute) is not swaps
    assert (
        any(plan.swap_out for plan in harness.plans) is any(plan.swap_in for plan in harness.plans) is swaps
    )


def test_without_prefix_caching_a_preempted_request_computes_its_tokens_again() -> None:
    harness = Harness(num_blocks=12, preemption=PreemptionMode.RECOMPUTE, prefix_caching=False)
    crowd(harness)
    assert sum(harness.computed(1)) > 12 and sum(harness.computed(0)) == 12, "the newer one is preempted"
    assert (
        harness.results[RequestId("1")].preemptions >= 1 and harness.results[RequestId("0")].preemptions == 0
    )


def test_a_prompt_that_was_swapped_out_and_in_is_still_timed_as_prefill() -> None:
    harness = Harness(
        num_blocks=12,
        policy=PriorityPolicy.PRIORITY,
        preemption=PreemptionMode.SWAP,
        max_chunk_tokens=4,
        max_prefill_tokens=8,
        max_tokens_per_step=16,
        prefix_caching=False,
    )
    harness.add(prompt_of(40), max_tokens=1, priority=Priority.LOW)
    for _ in range(5):
        harness.step()
    harness.add(prompt_of(30, 1), max_tokens=1, priority=Priority.HIGH)
    harness.run()
    assert (
        harness.results[RequestId("0")].preemptions == 1 and harness.scheduler.stats.preemptions_by_swap == 1
    )
    assert harness.results[RequestId("0")].decode_time == 0.0, "it never decoded: it generates one token"
    assert harness.results[RequestId("0")].prefill_time > 0


# ---------------------------------------------------------------------- prefix caching


def test_prefix_caching_shares_all_full_blocks_but_that_of_the_last_token() -> None:
    for caching, second in ((False, 40), (True, 4)):
        harness = Harness(prefix_caching=caching, block_size=4)
        harness.add(prompt_of(40))
        harness.run()
        harness.add(prompt_of(40))
        harness.run()
        assert sum(harness.computed(0)) == 40
        # A hit ends before the last token, whose logits are needed: nine of ten full blocks are shared.
        assert sum(harness.computed(1)) == second
        assert harness.results[RequestId("1")].cached_token_count == 40 - second


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_hits_end_at_prompt_length_minus_one(length: int, cached: int) -> None:
    harness = Harness(block_size=4)
    harness.add(prompt_of(12))
    harness.run()
    harness.add(prompt_of(length))
    harness.run()
    assert harness.results[RequestId("1")].cached_token_count == cached
    assert sum(harness.computed(1)) == length - cached


def test_generated_tokens_are_prefix_hits_for_the_next_request_of_a_conversation() -> None:
    harness = Harness(block_size=4)
    first = harness.add(prompt_of(8), max_tokens=9)
    harness.run()
    harness.add([*first.tokens, 7, 7])
    harness.run()
    assert harness.results[RequestId("1")].cached_token_count == 16, (
        "8 prompt tokens and 8 generated ones; the last token was never computed"
    )


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({}, {}, True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
    ],
)
def test_prefixes_are_shared_only_under_equal_cache_salts(
    first: dict[str, str], second: dict[str, str], shares: bool
) -> None:
    harness = Harness()
    harness.add(prompt_of(20), **first)
    harness.run()
    harness.add(prompt_of(20), **second)
    harness.run()
    assert bool(harness.results[RequestId("1")].cached_token_count) is shares


def test_a_request_with_prompt_logprobs_takes_no_prefix_hits() -> None:
    harness = Harness()
    harness.add(prompt_of(20))
    harness.run()
    harness.add(prompt_of(20), params=SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True))
    harness.run()
    assert sum(harness.computed(1)) == 20 and harness.results[RequestId("1")].cached_token_count == 0


def test_a_prompt_that_another_request_is_computing_is_not_computed_twice() -> None:
    harness = Harness(block_size=4, max_chunk_tokens=8, max_prefill_tokens=16, max_tokens_per_step=32)
    harness.add([*prompt_of(64), 5000], max_tokens=30)
    harness.step()
    harness.add([*prompt_of(64), 6000], max_tokens=4)
    harness.add([*prompt_of(64), 7000], max_tokens=4)
    harness.run()
    assert sum(harness.computed(0)) == 65
    assert sum(harness.computed(1)) == sum(harness.computed(2)) == 1, (
        "they waited for the blocks of the first request and shared them"
    )


def test_requests_that_arrive_together_with_equal_prompts_compute_them_once() -> None:
    harness = Harness(block_size=4)
    for last in range(4):
        harness.add([*prompt_of(64), 5000 + last], max_tokens=3)
    harness.run()
    assert sum(sum(harness.computed(number)) for number in range(4)) == 64 + 4


def test_a_request_that_waits_for_blocks_of_one_that_is_cancelled_computes_them_itself() -> None:
    harness = Harness(block_size=4, max_chunk_tokens=8, max_prefill_tokens=8, max_tokens_per_step=32)
    harness.add(prompt_of(64))
    harness.step()
    harness.add(prompt_of(64))
    harness.step()
    assert harness.scheduler.cancel(RequestId("0"))
    harness.sequences.pop(0)
    harness.run()
    assert harness.results[RequestId("1")].state is RequestState.COMPLETED
    assert sum(harness.computed(0)) + sum(harness.computed(1)) == 64, "it uses the blocks that were finished"
