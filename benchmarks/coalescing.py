"""`python -m benchmarks coalescing`: how much is saved if identical requests in flight are computed once.

Two engines run the same model; one of them does not coalesce. They get the same requests in turn, since the speed of a
shared machine changes from minute to minute. Equal requests arrive within 100 ms. Different requests show the cost of the
look-up when there is nothing to share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from weft.bench.overhead import NOOP_STEP_SECONDS
from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.request import InferenceRequest, SamplingParams
from weft.text.model_text import open_tokenizer

ARRIVAL_SECONDS = 0.1
SLOWER = 0.02
"""Different requests may take this fraction of the time longer, at the upper end of the interval."""
_TEXT = "Write a long story about a weaver, her loom, and the river that passed behind her house. "

Round = tuple[float, int]
"""Seconds until all answers are complete, and tokens that the engine computed."""


def main(*, backend: str, requests: int, tokens: int, rounds: int, json: bool) -> bool:
    """Measures and prints. Returns True if equal requests are faster and different ones are not slower."""
    found = asyncio.run(_measure(backend, requests, tokens, rounds))
    rows, changes = [], {}
    for name, (without, shared) in found.items():
        changes[name] = Ratios([one[0] for one in without], [one[0] for one in shared]).change()
        mean, low, high = changes[name]
        rows.append(
            (
                name,
                *(f"{median(one[0] for one in each):.3f}" for each in (without, shared)),
                f"{mean:+.1%} [{low:+.1%}, {high:+.1%}]",
                *(f"{median(one[1] for one in each):,.0f}" for each in (without, shared)),
            )
        )
    equal, different = changes["equal"], changes["different"]
    checks = [
        Check("time of equal requests", f"at most {equal[2]:+.1%}", "below 0%", equal[2] < 0),
        Check(
            "time of different requests",
            f"at most {different[2]:+.1%}",
            f"{SLOWER:+.0%}",
            different[2] < SLOWER,
        ),
    ]
    if json:
        print_json({"rounds": found, "changes": changes, "checks": checks, "machine": machine()})
    else:
        print_line(machine())
        print_table(
            f"{backend}: {requests} requests within {ARRIVAL_SECONDS:g} s, {tokens} tokens each, {rounds} rounds in turn",
            ("requests", "s without", "s with", "change, 95% interval", "tokens without", "tokens with"),
            rows,
        )
        print_checks(checks)
    return all(check.is_met for check in checks)


async def _measure(
    backend: str, requests: int, tokens: int, rounds: int
) -> dict[str, tuple[list[Round], list[Round]]]:
    path = str(pull("default"))
    tokenizer = open_tokenizer(open_checkpoint(path))
    options: dict[str, Any] = {"checkpoint": path}
    if backend == "noop":
        options = {"vocabulary_size": tokenizer.vocabulary_size, "seconds_per_step": NOOP_STEP_SECONDS}
    scheduler = SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, max_learned_bytes=0)
    config = ServingEngineConfig(scheduler)
    engines = [EngineClient(backend, options, config, coalesce=each) for each in (False, True)]
    params = SamplingParams(temperature=0, seed=1, max_tokens=tokens, ignore_eos=True)
    found: dict[str, tuple[list[Round], list[Round]]] = {"different": ([], []), "equal": ([], [])}
    number = 0
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        # Different requests come first, while both engines have computed the same tokens and use equal memory.
        for name, measured in found.items():
            for one in range(rounds + 1):  # the first is not counted
                texts = [f"{number + index * (name != 'equal')}. {_TEXT}" for index in range(requests)]
                number += requests
                prompts = [tuple(tokenizer.encode(text)) for text in texts]
                for which in (0, 1) if one % 2 else (1, 0):
                    result = await _round(engines[which], prompts, params)
                    if one:
                        measured[which].append(result)
    finally:
        for engine in engines:
            await engine.stop()
    return found


async def _round(engine: EngineClient, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Round:
    before = (await engine.metrics()).totals.tokens_computed
    began = time.perf_counter()

    async def ask(index: int) -> None:
        await asyncio.sleep(index * ARRIVAL_SECONDS / len(prompts))
        [answer] = await engine.submit(InferenceRequest(prompts[index], params))
        async for _ in answer:
            pass
        assert answer.result is not None and answer.num_tokens == params.max_tokens

    await asyncio.gather(*map(ask, range(len(prompts))))
    seconds = time.perf_counter() - began
    return seconds, (await engine.metrics()).totals.tokens_computed - before
