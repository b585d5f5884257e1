"""The engine on the card under everything at once: many threads, cancels, preemption, swap, prefix hits.

In the batch-invariant mode, so that every answer can be compared with that of the same request alone.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from card import Asked, answers, assert_same, mixed_requests, open_on_card, small_checkpoint

from weft.config import PreemptionMode
from weft.llm import LLM
from weft.request import GenerationResult, InferenceRequest, RequestState

THREADS = 12
ROUNDS = 10


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_answers_are_right_and_nothing_is_left_behind(mode: PreemptionMode) -> None:
    requests = [request for request in mixed_requests() if len(request[0]) <= 300]
    # Much less than all threads together would like to have.
    with open_on_card(
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
            asked = [threads.submit(_storm, llm, requests, alone, number) for number in range(THREADS)]
            num_cancelled = sum(one.result() for one in asked)
        _assert_idle(llm)
        stats, metrics = llm.engine.stats()[0], llm.engine.metrics()
        # What was asked after the storm is answered as before it.
        assert_same(answers(llm, requests[:6]), alone[:6])
    assert num_cancelled > THREADS
    assert metrics.requests_cancelled == num_cancelled and metrics.requests_failed == 0
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0
    assert stats.steps_failed == 0 and stats.swaps_failed == 0
    assert metrics.cached_tokens > 0


def _storm(llm: LLM, requests: list[Asked], alone: list[GenerationResult], seed: int) -> int:
    """Asks for answers, several at once, and compares them; gives up on others. How many of those ended cancelled."""
    chance = random.Random(seed)
    num_cancelled = 0
    for _ in range(ROUNDS):
        given_up = [
            llm.engine.submit(InferenceRequest(*chance.choice(requests))) for _ in range(chance.randint(0, 3))
        ]
        some = chance.sample(range(len(requests)), chance.randint(1, 6))
        time.sleep(chance.random() * 0.02)
        for request_id in given_up:
            llm.engine.cancel(request_id)
        results = llm.generate(
            [requests[index][0] for index in some],
            [requests[index][1] for index in some],
            show_progress=False,
        )
        assert_same(results, [alone[index] for index in some])
        # One that was cancelled as it ended is complete.
        ended = [llm.engine.get_result(request_id) for request_id in given_up]
        num_cancelled += sum(
            result is not None and result.state is RequestState.CANCELLED for result in ended
        )
    return num_cancelled


def _assert_idle(llm: LLM) -> None:
    give_up_at = time.monotonic() + 60
    while (metrics := llm.engine.metrics()).requests_running or metrics.requests_pending:
        assert time.monotonic() < give_up_at, "requests are left that never end"
        time.sleep(0.01)
    llm.engine.scheduler.check_integrity()
    assert metrics.requests_preempted == 0
