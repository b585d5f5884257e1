"""Several answers to one prompt share its work: prompts and lists are checked and hashed once."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import weft.request
from weft.backends.noop import NoopBackend
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.process import EngineProcess
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, RequestId, SamplingParams
from weft.scheduling.cache import block_pool as blocks

LISTS: dict[str, Any] = {"logit_bias": dict.fromkeys(range(1000), 1.0), "stop_token_ids": tuple(range(1000))}
PROMPT = tuple(range(1000))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the checks of request values and of token lists, and the computed block hashes."""
    counted: Counter[str] = Counter()

    def count(module: Any, name: str, what: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            counted[what] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    count(weft.request, "check_integer", "checks")
    count(weft.request, "check_number", "checks")
    count(weft.request, "token_ids", "prompts")
    count(blocks.hashlib, "sha256", "digests")
    return counted


def make_engine() -> ServingEngine:
    backend = NoopBackend(vocabulary_size=2000, max_context=4096)
    return ServingEngine(backend, ServingEngineConfig(cache=KvCachePoolConfig(1024, 16)))


def test_lists_are_checked_and_block_hashes_computed_once_for_all_answers(calls: Counter[str]) -> None:
    engine = make_engine()
    request = InferenceRequest(PROMPT, SamplingParams(n=128, seed=1, max_tokens=1, **LISTS))
    once, prompts = calls["checks"], calls["prompts"]
    engine.submit_choices(request)
    assert calls["checks"] < 1.1 * once
    assert calls["prompts"] == prompts, "the prompt is checked when the request is made"
    assert calls["digests"] <= len(PROMPT) // 16 + 1 + 128, (
        "one digest per block of the prompt, one for the salt, one for each seed"
    )
    sequences = list(engine.scheduler.sequences.values())
    assert len({id(one.request.params.logit_bias) for one in sequences}) == 1
    assert len({id(one.stop_ids) for one in sequences}) == 1
    engine.run_until_idle()
    assert engine.metrics().requests_completed == 128
    engine.stop()


def test_lists_are_checked_once_for_all_prompts_of_a_body(calls: Counter[str]) -> None:
    """Like the messages of the server: one for each prompt, or for each part of its answers."""
    params = SamplingParams(n=128, seed=1, max_tokens=1, **LISTS)
    once = calls["checks"]
    messages = [
        wire.framed(
            wire.Submit.of(
                (prompt,), InferenceRequest((prompt, 7, 8), params, request_id=RequestId(f"p{prompt}")), first
            )
        )
        for prompt, first in enumerate([0, 5] * 30)
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = EngineProcess(theirs)
        engine = process._engine = make_engine()
        calls.clear()
        for message in messages:
            process._handle(wire.to_engine.decode(message[4:]))
        assert calls["checks"] < 3 * once, "sixty messages share their params"
        assert len(engine.scheduler.sequences) == 60
        process._outbox.close(10.0)
        engine.stop()


def test_answers_submitted_in_parts_have_the_same_seeds_as_together() -> None:
    request = InferenceRequest(PROMPT[:20], SamplingParams(n=6, seed=3, max_tokens=4, prompt_logprobs=1))
    with make_engine() as engine:
        together = engine.submit_choices(request)
        parts = [engine.submit_choices(request, indices=range(*ends)) for ends in ((0, 1), (1, 4), (4, 6))]
        several = [engine.get_result(one, wait=60) for one in together]
        others = [engine.get_result(one, wait=60) for part in parts for one in part]
    assert [one.tokens for one in several if one] == [one.tokens for one in others if one]
    assert [one.prompt_logprobs for one in several if one] == [one.prompt_logprobs for one in others if one]
    assert len({one.tokens for one in others if one}) == 6


def test_waiting_time_is_subtracted_from_deadline_and_target() -> None:
    request = InferenceRequest((1,), SamplingParams(seed=4), deadline=10.0, ttft_target=1.0)
    (message,) = wire.Frames().feed(wire.framed(wire.Submit.of((1,), request, waited=4.0)))
    decoded = wire.to_engine.decode(message)
    assert isinstance(decoded, wire.Submit)
    assert decoded.whole_request == request.replaced(deadline=6.0, ttft_target=0.0)
