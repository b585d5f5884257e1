"""The batch-invariant mode on the GPU: tokens and logprobs do not depend on the batch, chunks, graphs or memory.

All results are compared bit for bit with those of the same request run alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_runs import Request, answers, assert_same, mixed_requests, open_on_gpu, small_checkpoint

from weft.config import PreemptionMode
from weft.llm import LLM
from weft.loading.checkpoint import Checkpoint
from weft.request import GenerationResult, SamplingParams

BLOCKS = 4096


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return small_checkpoint()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests()


def open_invariant(checkpoint: Checkpoint, **options: Any) -> LLM:
    return open_on_gpu(
        checkpoint, **{"invariant": True, "num_blocks": BLOCKS, "prefix_caching": False, **options}
    )


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with open_invariant(checkpoint) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(llm: LLM, requests: list[Request]) -> list[GenerationResult]:
    return [answers(llm, [request])[0] for request in requests]


def test_the_answers_differ_from_each_other(alone: list[GenerationResult]) -> None:
    """Otherwise the other tests could not detect mixed-up requests."""
    assert len({result.tokens for result in alone}) > len(alone) // 2
    assert all(len(set(result.tokens)) > 1 for result in alone[1::2])


def test_a_repeated_request_gets_the_same_answer(
    llm: LLM, requests: list[Request], alone: list[GenerationResult]
) -> None:
    """The first time, steps were launched kernel by kernel. Now they are replayed from graphs."""
    for _ in range(2):
        assert_same([answers(llm, [request])[0] for request in requests[::7]], alone[::7])


def test_the_rest_of_the_batch_changes_nothing(
    llm: LLM, requests: list[Request], alone: list[GenerationResult]
) -> None:
    for _ in range(2):
        assert_same(answers(llm, requests), alone)
    for size in (2, 3, 5, 9, 17):
        assert_same(answers(llm, requests[:size]), alone[:size])
    assert_same(answers(llm, requests[::-1]), alone[::-1])


@pytest.mark.parametrize("chunk", [7, 64, 100])
def test_chunks_change_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult], chunk: int
) -> None:
    with open_invariant(checkpoint, max_chunk_tokens=chunk, max_prefill_tokens=4 * chunk) as llm:
        assert_same(answers(llm, requests), alone)


def test_steps_without_overlap_change_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult]
) -> None:
    with open_invariant(checkpoint, overlap=False) as llm:
        assert_same(answers(llm, requests), alone)


def test_prefix_hits_change_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult]
) -> None:
    with open_invariant(checkpoint, prefix_caching=True) as llm:
        assert_same(answers(llm, requests), alone)
        again = answers(llm, requests)
    assert_same(again, alone)
    assert sum(result.cached_token_count > 0 for result in again) > len(again) // 2


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preemption_changes_nothing(
    checkpoint: Checkpoint, requests: list[Request], alone: list[GenerationResult], mode: PreemptionMode
) -> None:
    # Four of the longest start together in 32 blocks, and need 36 blocks with their answers. They are the last
    # requests, so all four wait when the first of them is admitted.
    short = [index for index, (prompt, _) in enumerate(requests) if len(prompt) <= 130]
    with open_invariant(checkpoint, num_blocks=32, swap_blocks=256, preemption=mode) as llm:
        results = answers(llm, [requests[index] for index in short])
        stats = llm.engine.stats()[0]
    assert_same(results, [alone[index] for index in short])
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0 and by_swap == 0
    assert stats.swaps_failed == 0 and stats.steps_failed == 0


def test_logprobs_of_prompts_do_not_depend_on_chunks_and_the_rest_of_the_batch(
    checkpoint: Checkpoint, llm: LLM, requests: list[Request]
) -> None:
    scored = [
        (prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2))
        for prompt, _ in requests[1::6]
    ]
    whole = [answers(llm, [request])[0].prompt_logprobs for request in scored]
    with open_invariant(checkpoint, max_chunk_tokens=50) as chunked:
        mixed = answers(chunked, [*scored, *requests[:8]])
    assert [result.prompt_logprobs for result in mixed[: len(scored)]] == whole
