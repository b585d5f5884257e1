"""How fast a full batch decodes over long contexts, by the kind of cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from benchmarks.kv_cache_kinds import STEP_TOKENS, Kind, Setup
from weft.errors import WeftError
from weft.request import InferenceRequest, RequestId, SamplingParams, TokenOutput

ROUND = 16
"""Steps in which every context fills a block, and moves one to the store: they are measured as one."""
ROUNDS = 5


@dataclass(frozen=True)
class Speed:
    """Of decoding alone: steps in which every context of the batch gets a token."""

    kind: str
    batch: int
    context: int
    tokens_per_second: float
    """Of the median round."""
    step_seconds: tuple[float, ...]
    """Of each round, on average."""


def decode_speed(
    setup: Setup,
    kind: Kind,
    *,
    batch: int,
    context: int,
    rounds: int = ROUNDS,
    quietly: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Speed:
    """Of contexts that have nothing in common and end with `context` tokens. `quietly` is entered once all prompts are
    computed and left when the last step is measured: whoever shares the machine can keep it quiet for so long."""
    # Prompts are computed one after the other, and who is done decodes meanwhile.
    lead = batch * -(-context // STEP_TOKENS) + 2
    new_tokens = min(context - 1, lead + ROUND * rounds + 2)
    source = random.Random(0)
    times: dict[RequestId, list[float]] = {}

    def note(output: TokenOutput) -> None:
        times[output.request_id].append(time.perf_counter())

    with setup.open(kind.pool_for(batch, context), context, batch) as engine:
        vocabulary = range(engine.scheduler.info.vocabulary_size)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            prompt = tuple(source.choices(vocabulary, k=context - new_tokens))
            times[engine.submit_with_callback(InferenceRequest(prompt, params), note)] = []
        while engine.has_work and not all(times.values()):
            engine.run_iteration()
        with quietly():
            since = time.perf_counter()
            while engine.has_work and not any(len(one) == new_tokens for one in times.values()):
                engine.run_iteration()
    return Speed(kind.name, batch, context, *_rate(list(times.values()), since, batch, rounds))


def _rate(times: list[list[float]], since: float, batch: int, rounds: int) -> tuple[float, tuple[float, ...]]:
    """From when the last of them has begun to when the first of them ends."""
    begin, end = max(since, *(one[0] for one in times)), min(one[-1] for one in times)
    last = max(times, key=lambda one: one[0])
    steps = [moment for moment in last if begin <= moment <= end]
    rates = [(steps[at] - steps[at - ROUND]) / ROUND for at in range(ROUND, len(steps), ROUND)]
    if not rates:
        raise WeftError(
            "the batch never decoded as a whole: some context had ended before the last one began"
        )
    kept = tuple(rates[-rounds:])
    return batch / statistics.median(kept), kept
