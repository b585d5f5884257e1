"""Small random models on the CUDA backend and on the CPU reference, and engines that run both."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from small_decoders import CONFIGS, decoder_of

from weft.backends.base import Backend
from weft.backends.cpu.runner import CpuBackend
from weft.backends.cuda.runner import CudaBackend
from weft.config import KvCacheKind, KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.models.config import ModelConfig
from weft.ops.base import AttentionShape
from weft.ops.reference import ReferenceOps
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.request import GenerationResult, InferenceRequest, SamplingParams, numbered_ids
from weft.text.grammar import GrammarCompiler
from weft.text.tokenizer import Tokenizer

TINY = dataclasses.replace(
    next(iter(CONFIGS.values())),
    layers=1,
    hidden_size=16,
    feed_forward_size=16,
    vocabulary_size=60,
    attention=AttentionShape(heads=2, kv_heads=1, head_size=16, scale=0.25),
    layer_patterns=(0,),
)
"""The tests check the engine, not the model; the interpreter is slow for every program of a kernel."""
END = 0
BLOCK_SIZE = 16


class Letters:
    """A tokenizer with one token for each of the first ASCII characters, digits included."""

    control_ids = frozenset({END})
    is_concatenative = True

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return list(text.encode())


def compiler(config: ModelConfig) -> GrammarCompiler:
    return GrammarCompiler(lambda: cast(Tokenizer, Letters()), {END}, config.vocabulary_size)


def cuda_backend(
    device: Device,
    config: ModelConfig = TINY,
    dtype: torch.dtype = torch.float32,
    invariant: bool = False,
    kind: type[CudaBackend] = CudaBackend,
) -> CudaBackend:
    ops = TritonOps(device, dtype)
    return kind(device, decoder_of(config, ops), ops, frozenset({END}), compiler(config), invariant)


def cpu_backend(config: ModelConfig = TINY) -> CpuBackend:
    """The numpy backend: it defines what the CUDA backend computes."""
    return CpuBackend(decoder_of(config, ReferenceOps(np.float32)), frozenset({END}), compiler(config))


def engine_of(
    backend: Backend,
    *,
    overlap: bool = True,
    num_blocks: int = 64,
    swap_blocks: int = 32,
    store_blocks: int | None = None,
    store_bits: int = 8,
    max_running: int = 4,
    **scheduling: Any,
) -> ServingEngine:
    """With `store_blocks` the cache has two tiers, and a tail of one block."""
    scheduler = SchedulerConfig(max_running=max_running, **scheduling)
    cache = KvCachePoolConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        swap_blocks=swap_blocks,
        kv_cache=KvCacheKind.FULL if store_blocks is None else KvCacheKind.TWO_TIER,
        tail_length=BLOCK_SIZE,
        store_bits=store_bits,
        store_blocks=store_blocks,
    )
    config = ServingEngineConfig(scheduler, cache, overlap=overlap)
    return ServingEngine(backend, config, seed=1, new_id=numbered_ids())


def run(
    engine: ServingEngine,
    requests: Sequence[InferenceRequest],
    meanwhile: Callable[[int], object] = lambda iteration: None,
) -> list[GenerationResult]:
    """Returns all results in order; checks the scheduler after every step."""
    ids = [engine.submit(request) for request in requests]
    iteration = 0
    while engine.has_work:
        engine.run_iteration()
        engine.scheduler.check_integrity()
        meanwhile(iteration)
        iteration += 1
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()
    assert all(result is not None for result in results)
    return cast(list[GenerationResult], results)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """A prompt of tokens that every small model has."""
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 48) for _ in range(length))


def request(length: int, seed: int, max_tokens: int = 4, **params: Any) -> InferenceRequest:
    given = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "seed": seed, **params}
    return InferenceRequest(prompt(length, seed), SamplingParams(**given))


def alone(
    requests: Sequence[InferenceRequest], config: ModelConfig = TINY, **options: Any
) -> list[GenerationResult]:
    """The results of the reference, one request at a time."""
    engine = engine_of(cpu_backend(config), overlap=False, max_running=1, **options)
    return run(engine, requests)


def tokens_of(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    assert all(result.error is None for result in results), [result.error for result in results]
    return [tuple(result.tokens) for result in results]


def with_params(request: InferenceRequest, **params: Any) -> InferenceRequest:
    return dataclasses.replace(request, params=dataclasses.replace(request.params, **params))
