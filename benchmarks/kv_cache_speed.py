"""Decode speed of a batch with long contexts, by kind of cache."""

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
"""Number of steps that are measured together: in these steps every context fills one KV block and moves one to the
store."""
ROUNDS = 5


@dataclass(frozen=True)
class Speed:
    """Speed of steps in which every context of the batch decodes one token."""

    kind: str
    batch: int
    context: int
    tokens_per_second: float
    """Speed of the median round."""
    step_seconds: tuple[float, ...]
    """Mean seconds per step of each round."""


def decode_speed(
    setup: Setup,
    kind: Kind,
    *,
    batch: int,
    context: int,
    rounds: int = ROUNDS,
    quietly: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Speed:
    """Measures contexts without common prefixes that end with `context` tokens.

    The measured steps run inside `quietly()`: a caller can stop other load on the machine there.
    """
    # Prompts are computed one after another. Meanwhile the contexts whose prompt is done decode up to `lead` tokens.
    lead = batch * -(-context // STEP_TOKENS) + 2
    new_tokens = min(context - 1, lead + ROUND * rounds + 2)
    source = random.Random(0)
    times: dict[RequestId, list[float]] = {}

    def record_token(output: TokenOutput) -> None:
        times[output.request_id].append(time.perf_counter())

    with setup.open(kind.pool_for(batch, context), context, batch) as engine:
        vocabulary = range(engine.scheduler.info.vocabulary_size)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            prompt = tuple(source.choices(vocabulary, k=context - new_tokens))
            times[engine.submit_with_callback(InferenceRequest(prompt, params), record_token)] = []
        while engine.has_work and not all(times.values()):
            engine.run_iteration()
        with quietly():
            since = time.perf_counter()
            while engine.has_work and not any(len(one) == new_tokens for one in times.values()):
                engine.run_iteration()
    return Speed(kind.name, batch, context, *_rate(list(times.values()), since, batch, rounds))


def _rate(times: list[list[float]], since: float, batch: int, rounds: int) -> tuple[float, tuple[float, ...]]:
    """The speed while all contexts decode: from the first token of the last context to the end of the first context."""
    begin, end = max(since, *(one[0] for one in times)), min(one[-1] for one in times)
    last = max(times, key=lambda one: one[0])
    steps = [moment for moment in last if begin <= moment <= end]
    rates = [(steps[at] - steps[at - ROUND]) / ROUND for at in range(ROUND, len(steps), ROUND)]
    if not rates:
        raise WeftError("the whole batch never decoded together: a context ended before the last one started")
    kept = tuple(rates[-rounds:])
    return batch / statistics.median(kept), kept
