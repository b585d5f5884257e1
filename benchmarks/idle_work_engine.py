"""Idle work beside interactive requests in an engine of this process, on a model with random weights.

This needs no model file and no HTTP, so it runs on a machine that has only torch: `--shape 8b --backend cuda`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from itertools import pairwise

from benchmarks.idle_work import IDLE_SECONDS, Figures, Pairs, is_idle_round, lengths
from weft.backends import registry
from weft.bench.gpu_work import MAX_CONTEXT, SHAPES, open_shape
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, SamplingParams
from weft.server.settings import ServerSettings


async def measure(backend: str, shape: str, seconds: float, rounds: int, clients: int, lines: int) -> Pairs:
    config = ServerSettings().engine
    if backend == "cuda":
        scheduler = dataclasses.replace(config.scheduler, **registry.GPU_BUDGETS)
        config = dataclasses.replace(config, scheduler=scheduler)
    built = registry.build(backend, checkpoint=open_shape(shape), max_context=MAX_CONTEXT)
    pairs = [(Figures(), Figures()) for _ in range(rounds)]
    with ServingEngine(built, config).start() as engine:
        vocabulary = SHAPES[shape]["vocab_size"]
        for has_idle_work in (False, True):  # warm-up: compiles kernels, captures graphs, learns costs
            await _round(
                engine, vocabulary, -1 - has_idle_work, 3.0, clients, lines if has_idle_work else 0, Figures()
            )
        for number in range(2 * rounds):
            has_idle_work = is_idle_round(number)
            now = pairs[number // 2][has_idle_work]
            began = time.perf_counter()
            await _round(engine, vocabulary, number, seconds, clients, lines if has_idle_work else 0, now)
            now.seconds += time.perf_counter() - began
    return pairs


async def _round(
    engine: ServingEngine,
    vocabulary: int,
    number: int,
    seconds: float,
    clients: int,
    lines: int,
    figures: Figures,
) -> None:
    """Runs interactive clients for some seconds, with `lines` idle requests in flight beside them. The two rounds of a
    pair, `number` and `number + 1`, have the same interactive requests."""
    idle = [
        asyncio.create_task(_idle_work(engine, random.Random(f"{number} {line}"), vocabulary, figures))
        for line in range(lines)
    ]
    await asyncio.sleep(IDLE_SECONDS if idle else 0.0)
    sources = [random.Random(f"{number // 2} {one} interactive") for one in range(clients)]
    salt = f"round {number}"
    await asyncio.gather(
        *(_interactive(engine, source, vocabulary, seconds, figures, salt) for source in sources)
    )
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


async def _interactive(
    engine: ServingEngine, source: random.Random, vocabulary: int, seconds: float, figures: Figures, salt: str
) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began, times = time.perf_counter(), []
        async for _ in engine.stream(_request(source, vocabulary).replaced(cache_salt=salt)):
            times.append(time.perf_counter())
        figures.first_token.append(times[0] - began)
        figures.gap += [later - earlier for earlier, later in pairwise(times)]
        await asyncio.sleep(source.expovariate(5.0))


async def _idle_work(engine: ServingEngine, source: random.Random, vocabulary: int, figures: Figures) -> None:
    while True:
        request = _request(source, vocabulary).replaced(is_idle_work=True)
        result = await engine.submit_async(request)
        figures.idle_tokens += result.completion_token_count


def _request(source: random.Random, vocabulary: int) -> InferenceRequest:
    prompt_length, answer_length = lengths(source)
    prompt = tuple(source.randrange(10, min(10_000, vocabulary)) for _ in range(prompt_length))
    return InferenceRequest(prompt, SamplingParams(max_tokens=answer_length, temperature=0, ignore_eos=True))
