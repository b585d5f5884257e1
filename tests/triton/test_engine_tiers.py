"""The engine with the CUDA backend and a two-tier cache: the result of a request depends neither on the batch nor on
moves of its blocks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from small_backends import BLOCK_SIZE, alone, cuda_backend, engine_of, prompt, request, run, tokens_of

from weft.config import PreemptionMode
from weft.ops.triton.device import Device
from weft.request import GenerationResult, InferenceRequest

TIERS = {"num_blocks": 32, "store_blocks": 40}
MIXED = [request(length, seed, max_tokens=6) for seed, length in enumerate([30, 5, 59, 43])]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_batch_gets_the_tokens_of_the_reference(device: Device, bits: int) -> None:
    engine = engine_of(cuda_backend(device), **TIERS, store_bits=bits, max_chunk_tokens=40)
    assert engine.scheduler.info.tail_blocks == 1 and engine.scheduler.info.store_blocks == 40
    results = run(engine, MIXED)
    assert tokens_of(results) == tokens_of(alone(MIXED, **TIERS, store_bits=bits))
    assert engine.metrics().two_tier.migrations > 4


def test_values_read_from_the_store_differ_from_the_written_ones(device: Device) -> None:
    """Otherwise the other tests here would pass without a store. Greedy tokens may be equal; probabilities are not."""
    long = [request(60, 8, max_tokens=3, logprobs=0)]
    stored, full = (
        run(engine_of(cuda_backend(device), num_blocks=32, **options), long)
        for options in ({"store_blocks": 40, "store_bits": 4}, {})
    )
    assert probabilities(stored) != probabilities(full)


def test_in_the_invariant_mode_probabilities_do_not_depend_on_batch_or_chunks(device: Device) -> None:
    requests = [request(length, seed, max_tokens=4, logprobs=0) for seed, length in enumerate([30, 59, 45])]
    together = run(
        engine_of(cuda_backend(device, invariant=True), **TIERS, max_chunk_tokens=17, max_prefill_tokens=40),
        requests,
    )
    apart = run(
        engine_of(cuda_backend(device, invariant=True), **TIERS, max_running=1, overlap=False), requests
    )
    assert tokens_of(together) == tokens_of(apart)
    assert probabilities(together) == probabilities(apart)


def probabilities(results: list[GenerationResult]) -> list[list[float]]:
    return [[entry.logprob for entry in result.logprobs or ()] for result in results]


def test_a_prefix_hit_may_use_stored_blocks(device: Device) -> None:
    shared = prompt(4 * BLOCK_SIZE + 3, 9)
    requests = [InferenceRequest((*shared, *prompt(length, length)), MIXED[0].params) for length in (3, 9)]
    engine = engine_of(cuda_backend(device), **TIERS)
    ids = []
    for one in requests:
        ids.append(engine.submit(one))
        engine.run_until_idle()
    assert engine.scheduler.stats.prompt_tokens_cached == 4 * BLOCK_SIZE
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()
    assert tokens_of(results) == tokens_of(alone(requests, **TIERS))


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_blocks_of_both_tiers_survive_preemption(device: Device, mode: PreemptionMode) -> None:
    requests = [request(38 + seed, seed, max_tokens=12) for seed in range(3)]
    small = {"num_blocks": 7, "store_blocks": 4, "swap_blocks": 7}
    engine = engine_of(cuda_backend(device), **small, preemption=mode, prefix_caching=False)
    results = run(engine, requests)
    stats = engine.scheduler.stats
    by_swap = mode is PreemptionMode.SWAP
    assert stats.preemptions_by_swap if by_swap else stats.preemptions_by_recompute
    assert tokens_of(results) == tokens_of(alone(requests, **TIERS))
