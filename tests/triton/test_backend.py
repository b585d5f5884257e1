"""The engine with the CUDA backend gives each request the tokens that the reference gives it alone: every
architecture, chunks, prefix hits. In the interpreter, or on the GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np
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

from weft.backends import registry
from weft.backends.cuda.memory import BlockMemory, free_bytes
from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError
from weft.loading.random_checkpoint import random_checkpoint
from weft.models.config import ModelConfig
from weft.ops.triton.device import Device
from weft.request import InferenceRequest

MIXED = [request(length, seed) for seed, length in enumerate([1, 5, 23, 16])]
ARCHITECTURES = {"tiny": TINY} | {
    name: config for name, config in CONFIGS.items() if "windows" in name or name == "experts"
}
"""Architectures that the backend could treat differently; `test_program` has all of them."""


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_a_batch_gets_the_tokens_of_the_reference(device: Device, config: ModelConfig) -> None:
    requests = MIXED if config is TINY else [MIXED[0], MIXED[2]]
    engine = engine_of(cuda_backend(device, config), max_chunk_tokens=17, max_prefill_tokens=24)
    assert tokens_of(run(engine, requests)) == tokens_of(alone(requests, config))


def test_the_loop_without_overlap_gives_the_same_tokens(device: Device) -> None:
    engine = engine_of(cuda_backend(device), overlap=False)
    assert tokens_of(run(engine, MIXED)) == tokens_of(alone(MIXED))


def test_bfloat16_works(device: Device) -> None:
    engine = engine_of(cuda_backend(device, dtype=torch.bfloat16))
    assert [len(tokens) for tokens in tokens_of(run(engine, MIXED))] == [4] * len(MIXED)


def test_a_cached_prefix_is_not_computed_again(device: Device) -> None:
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


def test_a_decode_step_of_a_kind_is_launched_then_captured_then_replayed(device: Device) -> None:
    backend = cuda_backend(device)
    captured: list[int] = []
    engine = engine_of(backend)
    run(engine, [request(5, 1, max_tokens=6)], lambda _: captured.append(len(backend._graphs._graphs)))
    assert captured[0] == 0 and captured[-1] == 1
    assert sum(before != after for before, after in pairwise(captured)) == 1


def test_in_the_invariant_mode_tokens_do_not_depend_on_the_batch(device: Device) -> None:
    together = run(engine_of(cuda_backend(device, invariant=True), max_chunk_tokens=16), MIXED)
    apart = run(engine_of(cuda_backend(device, invariant=True), max_running=1, overlap=False), MIXED)
    assert tokens_of(together) == tokens_of(apart) == tokens_of(alone(MIXED))


SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def test_a_checkpoint_is_opened_by_the_name_of_the_backend(device: Device) -> None:
    checkpoint = random_checkpoint(SHAPE, seed=3, fill_on_device=False)
    name = str(device.torch_device)
    backend = registry.build("cuda", checkpoint=checkpoint, device=name, dtype="float32", max_context=100)
    reference = registry.build("cpu", checkpoint=checkpoint, dtype=np.float32, max_context=100)
    engine = engine_of(backend)
    assert engine.scheduler.info.max_context == 100
    assert tokens_of(run(engine, MIXED)) == tokens_of(run(engine_of(reference), MIXED))


def test_a_data_type_without_kernels_is_rejected(device: Device) -> None:
    checkpoint = random_checkpoint(SHAPE)
    with pytest.raises(InvalidRequestError, match="dtype is 'int3'; allowed: bfloat16, float32"):
        registry.build("cuda", checkpoint=checkpoint, device=str(device.torch_device), dtype="int3")


def test_by_default_the_cache_takes_the_free_memory_less_a_reserve(device: Device) -> None:
    class Gpu(Device):
        def __init__(self, free: int) -> None:
            self.free = free

        def free_memory(self) -> int:
            return self.free

    memory = BlockMemory(KvCachePoolConfig(), 4096, 2048, 2 << 20, 0)
    assert memory.requested() is None
    assert memory.sizes(free_bytes(Gpu(100 << 30))) == (96 * 512, 0)
    assert memory.sizes(free_bytes(Gpu(9 << 30))) == (8 * 512, 0)
    assert memory.sizes(free_bytes(Gpu(1 << 20))) == (1, 0)
