"""Requests on the CUDA backend that are preempted or cancelled, or have a step that fails to launch. All remaining
requests get the tokens that the reference computes for each alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from small_backends import alone, cuda_backend, engine_of, request, run, tokens_of

from weft.backends.cuda.runner import CudaBackend
from weft.config import PreemptionMode
from weft.ops.triton.device import Device
from weft.plan import IterationPlan
from weft.request import RequestId, RequestState

MIXED = [request(length, seed) for seed, length in enumerate([1, 5, 23, 16])]


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_preempted_request_continues_with_the_same_tokens(device: Device, mode: PreemptionMode) -> None:
    requests = [request(13, seed, max_tokens=7) for seed in range(3)]
    engine = engine_of(cuda_backend(device), num_blocks=4, preemption=mode, prefix_caching=False)
    results = run(engine, requests)
    stats = engine.scheduler.stats
    if mode is PreemptionMode.SWAP:
        assert stats.preemptions_by_swap > 0 and stats.swaps_failed == 0
    else:
        assert stats.preemptions_by_recompute > 0
    assert tokens_of(results) == tokens_of(alone(requests))


def test_cancelled_requests_do_not_affect_the_others(device: Device) -> None:
    requests = [request(5 + seed, seed, max_tokens=6) for seed in range(5)]
    engine = engine_of(cuda_backend(device), max_running=3)

    def cancel(iteration: int) -> None:
        for number, moment in ((1, 2), (4, 4)):
            if iteration == moment:
                engine.cancel(RequestId(str(number)))

    results = run(engine, requests, cancel)
    assert [result.state is RequestState.CANCELLED for result in results] == [
        number in (1, 4) for number in range(5)
    ]
    expected = tokens_of(alone(requests))
    for number, result in enumerate(results):
        assert tuple(result.tokens) == expected[number][: len(result.tokens)]
        assert number in (1, 4) or len(result.tokens) == 6


class Faulty(CudaBackend):
    """A backend that fails to launch one of its steps."""

    failing = -1

    def _launch(self, plan: IterationPlan, *rest: Any) -> None:
        super()._launch(plan, *rest)
        if plan.step == self.failing:
            raise RuntimeError("a launch that failed")


@pytest.mark.parametrize(("failing", "overlap"), [(0, True), (3, True), (2, False)])
def test_a_step_that_fails_to_launch_is_repeated_and_nothing_is_lost(
    device: Device, failing: int, overlap: bool
) -> None:
    backend = cuda_backend(device, kind=Faulty)
    assert isinstance(backend, Faulty)
    backend.failing = failing
    engine = engine_of(backend, overlap=overlap)
    results = run(engine, MIXED)
    assert engine.scheduler.stats.steps_failed == 1
    assert tokens_of(results) == tokens_of(alone(MIXED))
