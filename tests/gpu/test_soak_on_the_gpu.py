"""The engine on the GPU under load: many threads, cancels, preemption, swap and prefix hits at the same time.

It runs in the batch-invariant mode, so that every answer can be compared with that of the same request run alone.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu_runs import Request, answers, assert_same, mixed_requests, open_on_gpu, small_checkpoint

from weft.config import PreemptionMode
from weft.llm import LLM
from weft.request import GenerationResult, InferenceRequest, RequestState

THREADS = 12
ITERATIONS = 10


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_answers_are_correct_and_the_engine_is_idle_at_the_end(mode: PreemptionMode) -> None:
    requests = [request for request in mixed_requests() if len(request[0]) <= 300]
    # Far fewer blocks than the requests of all threads need.
    with open_on_gpu(
        small_checkpoint(),
        invariant=True,
        num_blocks=96,
        swap_blocks=1024,
        preemption=mode,
        max_chunk_tokens=96,
        max_prefill_tokens=256,
    ) as llm:
        alone = [answers(llm, [request])[0] for request in requests]
        with ThreadPoolExecutor(THREADS) as threads:
            loads = [threads.submit(_load, llm, requests, alone, number) for number in range(THREADS)]
            num_cancelled = sum(load.result() for load in loads)
        _assert_idle(llm)
        stats, metrics = llm.engine.stats()[0], llm.engine.metrics()
        # Requests after the load get the same answers as before it.
        assert_same(answers(llm, requests[:6]), alone[:6])
    assert num_cancelled > THREADS
    assert metrics.requests_cancelled == num_cancelled and metrics.requests_failed == 0
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0
    assert stats.steps_failed == 0 and stats.swaps_failed == 0
    assert metrics.cached_tokens > 0


def _load(llm: LLM, requests: list[Request], alone: list[GenerationResult], seed: int) -> int:
    """Runs some requests at a time and compares their answers. Submits and cancels others. Returns how many of these
    ended as cancelled."""
    dice = random.Random(seed)
    num_cancelled = 0
    for _ in range(ITERATIONS):
        cancelled = [
            llm.engine.submit(InferenceRequest(*dice.choice(requests))) for _ in range(dice.randint(0, 3))
        ]
        some = dice.sample(range(len(requests)), dice.randint(1, 6))
        time.sleep(dice.random() * 0.02)
        for request_id in cancelled:
            llm.engine.cancel(request_id)
        results = llm.generate(
            [requests[index][0] for index in some],
            [requests[index][1] for index in some],
            show_progress=False,
        )
        assert_same(results, [alone[index] for index in some])
        # A request that ended before its cancel is complete.
        ended = [llm.engine.get_result(request_id) for request_id in cancelled]
        num_cancelled += sum(
            result is not None and result.state is RequestState.CANCELLED for result in ended
        )
    return num_cancelled


def _assert_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 60
    while (metrics := llm.engine.metrics()).requests_running or metrics.requests_pending:
        assert time.monotonic() < deadline, "some requests never end"
        time.sleep(0.01)
    llm.engine.scheduler.check_integrity()
    assert metrics.requests_preempted == 0
