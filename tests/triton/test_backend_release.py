"""A backend that was closed, or failed to open, keeps no GPU memory, even if the engine, the model or the error is
kept. The garbage collector does not help here: `LLM` freezes it on a GPU."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from small_backends import cuda_backend, engine_of, prompt, request, run, tokens_of
from watched_gpu import SHAPE, WatchedGpu

from weft.backends import registry
from weft.backends.cuda import runner
from weft.backends.cuda.runner import open_cuda_backend
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine import serving
from weft.engine.serving import ServingEngine
from weft.errors import ModelFileError, OutOfMemoryError
from weft.llm import LLM
from weft.loading.random_checkpoint import random_checkpoint
from weft.ops.triton.device import Device
from weft.request import Grammar, SamplingParams

REQUESTS = [
    *(request(13, seed, max_tokens=7) for seed in range(3)),
    request(9, 4, temperature=1.0, top_p=0.9, logprobs=2, prompt_logprobs=1),
    request(3, 5, grammar=Grammar("regex", "[0-9]+"), ignore_eos=False),
]


@pytest.fixture
def gpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedGpu]:
    """A tracked device, with the garbage collector disabled."""
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    yield WatchedGpu(str(device.torch_device))
    gc.enable()


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"num_blocks": 8, "store_blocks": 12}],
    ids=["overlapped", "plain", "two tiers"],
)
def test_a_closed_engine_keeps_no_memory(gpu: WatchedGpu, options: dict[str, Any]) -> None:
    engine = engine_of(cuda_backend(gpu), **{"num_blocks": 6, **options})
    results = run(engine, REQUESTS)
    assert len(tokens_of(results)) == len(REQUESTS)
    assert len(gpu.taken) > 50 and gpu.num_released == 1
    assert gpu.alive == 0
    assert engine.metrics().requests_completed == len(REQUESTS)  # metrics are still readable


def test_steps_that_were_in_flight_when_the_engine_failed_keep_no_memory(
    gpu: WatchedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(cuda_backend(gpu))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake in the engine")

    monkeypatch.setattr(engine.scheduler, "apply", fail)
    engine.submit(REQUESTS[0])
    failed = False
    try:
        engine.run_until_idle()
    except ZeroDivisionError:
        failed = True
    engine.stop()
    assert failed and gpu.alive == 0


def test_a_backend_may_be_closed_twice_and_before_it_was_allocated(gpu: WatchedGpu) -> None:
    backend = cuda_backend(gpu)
    assert gpu.alive > 0
    backend.close()
    backend.close()
    assert gpu.alive == 0


def test_a_model_that_fails_to_load_keeps_no_memory_even_if_its_error_is_kept(gpu: WatchedGpu) -> None:
    checkpoint = random_checkpoint(SHAPE, fill_on_device=False)
    tensors = {name: source for name, source in checkpoint.tensors.items() if name != "model.norm.weight"}
    damaged = dataclasses.replace(checkpoint, tensors=tensors)
    with pytest.raises(ModelFileError, match=r"norm.weight: the tensor is missing") as error:
        open_cuda_backend(damaged, device=gpu)
    assert len(gpu.taken) > 10 and gpu.num_released == 1
    assert gpu.alive == 0, error


def test_a_cache_that_does_not_fit_keeps_no_memory_even_if_its_error_is_kept(gpu: WatchedGpu) -> None:
    backend = open_cuda_backend(random_checkpoint(SHAPE, fill_on_device=False), device=gpu)
    with pytest.raises(OutOfMemoryError) as error:
        ServingEngine(backend, ServingEngineConfig(cache=KvCachePoolConfig(memory=1 << 50)))
    assert gpu.alive == 0, error


def test_an_engine_that_fails_to_start_keeps_no_memory_even_if_its_backend_is_kept(
    gpu: WatchedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the scheduler")

    monkeypatch.setattr(serving, "ContinuousBatchScheduler", fail)
    backend = cuda_backend(gpu)
    with pytest.raises(MemoryError, match="no room for the scheduler") as error:
        ServingEngine(backend, ServingEngineConfig(cache=KvCachePoolConfig(num_blocks=8)))
    assert gpu.alive == 0, error


def test_a_closed_model_keeps_no_memory_in_a_frozen_heap(
    gpu: WatchedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "why_no_gpu", lambda: None)
    monkeypatch.setattr(runner, "Device", lambda name: gpu)
    gc.unfreeze()
    options: dict[str, Any] = {"max_running": 4, "max_tokens_per_step": 64, "max_prefill_tokens": 32}
    llm = LLM(random_checkpoint(SHAPE, fill_on_device=False), device="cuda", num_blocks=16, **options)
    assert gc.get_freeze_count() > 0
    other = LLM(random_checkpoint(SHAPE, fill_on_device=False), device="cuda", num_blocks=16, **options)
    ids = llm.generate([prompt(9, 1)], SamplingParams(max_tokens=3, temperature=0.0))
    assert len(ids[0].tokens) == 3 and gpu.alive > 50
    llm.close()
    assert gc.get_freeze_count() > 0, "the other model is still open"
    other.close()
    llm.close()
    assert gpu.alive == 0
    assert gc.get_freeze_count() == 0


def test_streams_are_reused_so_that_libraries_keep_memory_for_few(device: Device) -> None:
    if not device.is_gpu:
        pytest.skip("the interpreter has no streams")
    first = Device(str(device.torch_device))
    streams = [first.stream() for _ in range(3)]
    first.release()
    second = Device(str(device.torch_device))
    assert [second.stream() for _ in range(3)] == streams
    assert second.stream() not in streams
    second.release()


def test_an_engine_continues_while_another_one_in_the_process_is_closed(device: Device) -> None:
    left, right = (engine_of(cuda_backend(Device(str(device.torch_device)))) for _ in range(2))
    expected = tokens_of(run(left, REQUESTS[:3]))
    ids = [right.submit(one) for one in REQUESTS[:3]]
    right.run_until_idle()
    results = [right.get_result(request_id) for request_id in ids]
    assert [result and result.tokens for result in results] == expected
    right.stop()
