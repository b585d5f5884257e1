"""The engine over the CUDA backend gives what the reference gives each request alone: every architecture, chunks, prefix
hits, preemption, cancels, faults. In the interpreter, or on the card."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from small_backends import (
    BLOCK_SIZE,
    TINY,
    alone,
    cuda_backend,
    engine_of,
    prompt,
    request,
    run,
    tokens_of,
)
from small_decoders import CONFIGS

from weft.backends.cuda.runner import CudaBackend
from weft.config import PreemptionMode
from weft.models.config import ModelConfig
from weft.ops.triton.device import Device
from weft.plan import IterationPlan
from weft.request import InferenceRequest, RequestId, RequestState

MIXED = [request(length, seed) for seed, length in enumerate([1, 5, 23, 16])]
ARCHITECTURES = {"tiny": TINY} | {
    name: config for name, config in CONFIGS.items() if "windows" in name or name == "experts"
}
"""Those that the backend could treat differently; `test_program` has them all."""


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_a_batch_gets_the_tokens_of_the_reference(device: Device, config: ModelConfig) -> None:
    requests = MIXED if config is TINY else [MIXED[0], MIXED[2]]
    engine = engine_of(cuda_backend(device, config), max_chunk_tokens=17, max_prefill_tokens=24)
    assert tokens_of(run(engine, requests)) == tokens_of(alone(requests, config))


def test_the_loop_that_does_not_overlap_steps_gives_the_same(device: Device) -> None:
    engine = engine_of(cuda_backend(device), overlap=False)
    assert tokens_of(run(engine, MIXED)) == tokens_of(alone(MIXED))


def test_in_bfloat16_nothing_breaks(device: Device) -> None:
    engine = engine_of(cuda_backend(device, dtype=torch.bfloat16))
    assert [len(tokens) for tokens in tokens_of(run(engine, MIXED))] == [4] * len(MIXED)


def test_a_prefix_that_is_cached_is_not_computed_again(device: Device) -> None:
    shared = prompt(BLOCK_SIZE + 3, 9)
    requests = [InferenceRequest((*shared, *prompt(length, length)), MIXED[0].params) for length in (3, 9)]
    engine = engine_of(cuda_backend(device))
    first = run_more(engine, requests[:1])
    rest = run_more(engine, requests[1:])
    assert engine.scheduler.stats.prompt_tokens_cached == BLOCK_SIZE
    assert tokens_of(first + rest) == tokens_of(alone(requests))
    engine.stop()


def run_more(engine: Any, requests: list[InferenceRequest]) -> list[Any]:
    ids = [engine.submit(one) for one in requests]
    engine.run_until_idle()
    return [engine.get_result(request_id) for request_id in ids]


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_request_that_had_to_give_way_goes_on_as_if_it_had_not(
    device: Device, mode: PreemptionMode
) -> None:
    requests = [request(13, seed, max_tokens=7) for seed in range(3)]
    engine = engine_of(cuda_backend(device), num_blocks=4, preemption=mode, prefix_caching=False)
    results = run(engine, requests)
    stats = engine.scheduler.stats
    if mode is PreemptionMode.SWAP:
        assert stats.preemptions_by_swap > 0 and stats.swaps_failed == 0
    else:
        assert stats.preemptions_by_recompute > 0
    assert tokens_of(results) == tokens_of(alone(requests))


def test_cancelled_requests_leave_the_others_alone(device: Device) -> None:
    requests = [request(5 + seed, seed, max_tokens=6) for seed in range(5)]
    engine = engine_of(cuda_backend(device), max_running=3)

    def cancel(iteration: int) -> None:
        for number, moment in ((1, 2), (4, 4)):
            if iteration == moment:
                engine.cancel(RequestId(number))

    results = run(engine, requests, cancel)
    assert [result.state is RequestState.CANCELLED for result in results] == [
        number in (1, 4) for number in range(5)
    ]
    expected = tokens_of(alone(requests))
    for number, result in enumerate(results):
        assert tuple(result.tokens) == expected[number][: len(result.tokens)]
        assert number in (1, 4) or len(result.tokens) == 6


class Faulty(CudaBackend):
    """Cannot launch one of its steps."""

    failing = -1

    def _launch(self, plan: IterationPlan, *rest: Any) -> None:
        super()._launch(plan, *rest)
        if plan.step == self.failing:
            raise RuntimeError("a launch that failed")


@pytest.mark.parametrize(("failing", "overlap"), [(0, True), (3, True), (2, False)])
def test_a_step_that_cannot_be_launched_is_tried_again_and_nothing_is_lost(
    device: Device, failing: int, overlap: bool
) -> None:
    backend = cuda_backend(device, kind=Faulty)
    assert isinstance(backend, Faulty)
    backend.failing = failing
    engine = engine_of(backend, overlap=overlap)
    results = run(engine, MIXED)
    assert engine.scheduler.stats.steps_failed == 1
    assert tokens_of(results) == tokens_of(alone(MIXED))


def test_a_decode_step_of_a_kind_is_launched_then_captured_then_replayed(device: Device) -> None:
    backend = cuda_backend(device)
    captured: list[int] = []
    engine = engine_of(backend)
    run(engine, [request(5, 1, max_tokens=6)], lambda _: captured.append(backend._graphs.num_captured))
    assert captured[0] == 0 and captured[-1] == 1
    assert sum(before != after for before, after in pairwise(captured)) == 1


def test_in_the_invariant_mode_tokens_do_not_depend_on_company(device: Device) -> None:
    together = run(engine_of(cuda_backend(device, invariant=True), max_chunk_tokens=16), MIXED)
    apart = run(engine_of(cuda_backend(device, invariant=True), max_running=1, overlap=False), MIXED)
    assert tokens_of(together) == tokens_of(apart) == tokens_of(alone(MIXED))
