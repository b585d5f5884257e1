"""The CPU backend with changing batches: requests arrive, are cancelled, preempted and swapped while steps overlap.
Each still gets the same tokens and logprobs as alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from weft.backends.cpu.runner import CpuBackend, open_cpu_backend
from weft.config import (
    KvCacheKind,
    KvCachePoolConfig,
    PreemptionMode,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.loading.random_checkpoint import random_checkpoint
from weft.request import GenerationResult, InferenceRequest, RequestState, SamplingParams, TokenOutput

WAIT = 120.0
VOCABULARY = 301
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TIERS = {
    "full": {},
    "two-tier": {"kv_cache": KvCacheKind.TWO_TIER, "tail_length": 16, "store_blocks": 30},
}


def backend(threads: int) -> CpuBackend:
    return open_cpu_backend(random_checkpoint(SHAPE), threads=threads, quantize="int8")


def make_requests(count: int) -> list[InferenceRequest]:
    rng = random.Random(5)
    requests = []
    for seed in range(count):
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 17, 40, 70]), "seed": seed}
        params["temperature"] = rng.choice([0.0, 1.0, 2.0])
        if rng.random() < 0.3:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
        if rng.random() < 0.3:
            params |= {"top_k": 20, "top_p": 0.9}
        if rng.random() < 0.2:
            params["logprobs"] = 2
        if rng.random() < 0.15:
            params["prompt_logprobs"] = 1
        if rng.random() < 0.4:
            params["stop_token_ids"] = tuple(rng.sample(range(VOCABULARY), 8))
        length, family = rng.choice([1, 3, 15, 16, 17, 40, 60]), rng.randrange(4)
        prompt = [(family * 31 + place * 7) % VOCABULARY for place in range(length)]
        if rng.random() < 0.5:
            prompt = [rng.randrange(VOCABULARY) for _ in prompt]
        requests.append(InferenceRequest(tuple(prompt), SamplingParams(ignore_eos=True, **params)))
    return requests


def content(result: GenerationResult) -> tuple[object, ...]:
    def values(logprobs: Sequence[Any] | None) -> list[object]:
        return [(one.logprob, one.top) for one in logprobs or () if one is not None]

    return list(result.tokens), values(result.logprobs), values(result.prompt_logprobs)


@pytest.mark.parametrize("tiers", TIERS)
def test_every_request_gets_what_it_gets_alone_while_others_arrive_end_and_are_preempted(tiers: str) -> None:
    requests = make_requests(60)
    pool = TIERS[tiers]
    quiet = ServingEngineConfig(
        scheduler=SchedulerConfig(max_running=1, prefix_caching=False),
        cache=KvCachePoolConfig(num_blocks=64, **pool),  # type: ignore[arg-type]
        overlap=False,
    )
    with ServingEngine(backend(1), quiet, seed=1) as engine:
        alone = [engine.get_result(engine.submit(request), wait=WAIT) for request in requests]
    num_preemptions = 0
    for seed in range(3):
        rng = random.Random(seed)
        config = ServingEngineConfig(
            scheduler=SchedulerConfig(
                max_running=rng.choice([6, 12]),
                max_tokens_per_step=rng.choice([64, 256]),
                max_prefill_tokens=64,
                max_chunk_tokens=rng.choice([7, 16, 64]),
                preemption=list(PreemptionMode)[seed % len(PreemptionMode)],
            ),
            cache=KvCachePoolConfig(num_blocks=12, swap_blocks=rng.choice([10, 30]), **pool),  # type: ignore[arg-type]
        )
        with ServingEngine(backend(rng.choice([1, 2])), config, seed=1) as engine:
            order = rng.sample(range(len(requests)), len(requests))
            cancelled = set(order[::4])
            ids, timers = {}, []
            for index in order:
                ids[index] = engine.submit(requests[index])
                if index in cancelled:
                    timers.append(threading.Timer(0.3 * rng.random(), engine.cancel, (ids[index],)))
                    timers[-1].start()
            for index in order:
                result, expected = engine.get_result(ids[index], wait=WAIT), alone[index]
                assert result is not None and expected is not None
                num_preemptions += result.preemptions
                if result.state is RequestState.COMPLETED:
                    assert content(result) == content(expected), (seed, index)
                else:
                    assert index in cancelled, (seed, index, result.state, result.error)
                    assert result.tokens == expected.tokens[: len(result.tokens)], (seed, index)
            for timer in timers:
                timer.join(WAIT)
            engine.scheduler.check_integrity()
            used = engine.stats()[1]
            assert (used.rows_used, used.blocks_used, used.swap_blocks_used) == (0, 0, 0)
    assert num_preemptions > 0


def test_a_step_is_reported_while_the_next_one_computes() -> None:
    """Otherwise the scheduler would plan only while the cores are idle."""
    num_tokens, num_computed, num_submitted, num_reported = 12, 0, 0, 0
    changed = threading.Condition()
    watched = backend(1)
    compute, submit = watched._forward.step, watched.submit

    def watched_compute(*arguments: Any) -> Any:
        nonlocal num_computed
        num_computed += 1
        with changed:  # wait until the next step is submitted and the previous one is reported
            num_expected = min(num_computed + 1, num_tokens)
            assert changed.wait_for(
                lambda: num_submitted >= num_expected and num_reported >= num_computed - 1, WAIT / 10
            )
        return compute(*arguments)

    def watched_submit(plan: Any) -> Any:
        nonlocal num_submitted
        step = submit(plan)
        with changed:
            num_submitted += 1
            changed.notify()
        return step

    def on_token(output: TokenOutput) -> None:
        nonlocal num_reported
        with changed:
            num_reported += 1
            changed.notify()

    watched._forward.step, watched.submit = watched_compute, watched_submit  # type: ignore[method-assign]
    request = InferenceRequest(
        (1, 2, 3), SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    )
    with ServingEngine(
        watched, ServingEngineConfig(cache=KvCachePoolConfig(num_blocks=16)), seed=1
    ) as engine:
        result = engine.get_result(engine.submit_with_callback(request, on_token), wait=WAIT)
    assert result is not None and result.state is RequestState.COMPLETED, result
    assert num_reported == num_computed == num_tokens
