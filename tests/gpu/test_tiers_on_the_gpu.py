"""The two-tier cache on the GPU, in the batch-invariant mode. Answers do not depend on the rest of the batch, chunks,
prefix hits or preemption, bit for bit. They differ from those of a plain cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_runs import Request, answers, assert_same, mixed_requests, open_on_gpu, small_checkpoint

from weft.config import KvCacheKind, PreemptionMode
from weft.llm import LLM
from weft.loading.checkpoint import Checkpoint
from weft.request import GenerationResult

TAIL = 64


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return small_checkpoint()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests()


def open_tiers(checkpoint: Checkpoint, bits: int = 8, **options: Any) -> LLM:
    tiers = {"kv_cache": KvCacheKind.TWO_TIER, "tail_length": TAIL, "store_bits": bits}
    sizes = {"num_blocks": 1024, "store_blocks": 3000}
    return open_on_gpu(
        checkpoint, **{"invariant": True, "prefix_caching": False, **tiers, **sizes, **options}
    )


@pytest.fixture(scope="module", params=[8, 4], ids="{} bits".format)
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint, bits: int) -> Iterator[LLM]:
    with open_tiers(checkpoint, bits) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(llm: LLM, requests: list[Request]) -> list[GenerationResult]:
    return [answers(llm, [request])[0] for request in requests]


def test_the_rest_of_the_batch_changes_nothing(
    llm: LLM, requests: list[Request], alone: list[GenerationResult]
) -> None:
    for _ in range(2):
        assert_same(answers(llm, requests), alone)
    for size in (2, 5, 17):
        assert_same(answers(llm, requests[-size:]), alone[-size:])
    tiers = llm.engine.metrics().two_tier
    assert tiers is not None and tiers.migrations > 1000


def test_chunks_change_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult], bits: int
) -> None:
    """Chunks shorter than a block, shorter than the tail, and longer than both."""
    for chunk in (7, 50, 300):
        with open_tiers(checkpoint, bits, max_chunk_tokens=chunk, max_prefill_tokens=4 * chunk) as llm:
            assert_same(answers(llm, requests), alone)


def test_prefix_hits_change_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult], bits: int
) -> None:
    with open_tiers(checkpoint, bits, prefix_caching=True) as llm:
        assert_same(answers(llm, requests), alone)
        again = answers(llm, requests)
        tiers = llm.engine.metrics().two_tier
    assert_same(again, alone)
    assert sum(result.cached_token_count > TAIL for result in again) > len(again) // 3
    assert tiers is not None and tiers.migrations_shared > 0


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preemption_changes_nothing(
    checkpoint: Checkpoint,
    requests: list[Request],
    alone: list[GenerationResult],
    bits: int,
    mode: PreemptionMode,
) -> None:
    short = [index for index, (prompt, _) in enumerate(requests) if len(prompt) <= 130]
    sizes = {"num_blocks": 32, "store_blocks": 20, "swap_blocks": 256}
    with open_tiers(checkpoint, bits, **sizes, preemption=mode) as llm:
        results = answers(llm, [requests[index] for index in short])
        stats = llm.engine.stats()[0]
    assert_same(results, [alone[index] for index in short])
    assert stats.preemptions_by_swap if mode is PreemptionMode.SWAP else stats.preemptions_by_recompute
    assert stats.swaps_failed == 0 and stats.steps_failed == 0


def test_long_requests_get_other_logprobs_than_with_a_plain_cache(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult]
) -> None:
    """Otherwise these tests would pass without a store."""
    with open_on_gpu(checkpoint, invariant=True, num_blocks=4096, prefix_caching=False) as llm:
        plain = answers(llm, requests)
    for (prompt, _), result, other in zip(requests, alone, plain, strict=True):
        assert len(prompt) < 2 * TAIL or result.logprobs != other.logprobs
