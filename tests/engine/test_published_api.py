"""The published API: text in streams, outputs of an iteration, metadata, recent rates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.backends.base import OpenedModel
from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.replay import replay
from weft.engine.serving import ServingEngine
from weft.llm import LLM
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestState,
    SamplingParams,
    TokenOutput,
)

POOL = KvCachePoolConfig(num_blocks=512, block_size=4)


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[ServingEngine]:
    config = ServingEngineConfig(cache=KvCachePoolConfig(memory=64 << 20))
    with ServingEngine.from_model(str(default_model_path), config, device="cpu", threads=1) as engine:
        yield engine


def ask(engine: ServingEngine, prompt: str, **params: object) -> InferenceRequest:
    assert engine.tokenizer is not None
    tokens = tuple(engine.tokenizer.encode(prompt))
    return InferenceRequest(tokens, SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}))  # type: ignore[arg-type]


def test_a_stream_with_a_callback_prints_text(engine: ServingEngine) -> None:
    pieces: list[str] = []
    request_id = engine.submit_with_callback(
        ask(engine, "The capital of France is"), lambda output: pieces.append(output.text)
    )
    result = engine.get_result(request_id, wait=60)
    assert "".join(pieces).startswith(" Paris.") and len(pieces) == 8
    assert result is not None and result.text == "".join(pieces)


def test_an_async_stream_and_a_polled_result_have_text(engine: ServingEngine) -> None:
    async def streamed() -> str:
        return "".join([output.text async for output in engine.stream(ask(engine, "1, 2, 3, 4,"))])

    text = asyncio.run(streamed())
    assert text.startswith(" 5, 6")
    request_id = engine.submit(ask(engine, "1, 2, 3, 4,"))
    result = engine.get_result(request_id, wait=60)
    assert result is not None and result.text == text


def test_texts_equal_those_of_llm_with_split_characters_stop_strings_and_ends(
    engine: ServingEngine, default_model_path: Path
) -> None:
    prompts = ["日本の首都は", "Count: 1, 2,", "A smile: 😀 and another"]
    params = [
        SamplingParams(max_tokens=24, temperature=0.0),
        SamplingParams(max_tokens=24, temperature=0.0, stop=(" 5,",)),
        SamplingParams(max_tokens=24, temperature=1.5, seed=3),
    ]
    with LLM(str(default_model_path), device="cpu", threads=1, memory=64 << 20) as llm:
        expected = llm.generate(prompts, params, show_progress=False)
    for prompt, one, result in zip(prompts, params, expected, strict=True):
        assert engine.tokenizer is not None
        tokens = tuple(engine.tokenizer.encode(prompt))
        pieces: list[str] = []
        request_id = engine.submit_with_callback(
            InferenceRequest(tokens, one), lambda output, pieces=pieces: pieces.append(output.text)
        )
        found = engine.get_result(request_id, wait=60)
        assert found is not None
        assert (found.text, found.tokens, found.finish_reason) == (
            result.text,
            result.tokens,
            result.finish_reason,
        )
        assert "".join(pieces) == result.text
    assert expected[1].finish_reason is FinishReason.STOP and expected[1].text.endswith(" 4,")


def test_the_texts_of_ended_requests_are_dropped(engine: ServingEngine) -> None:
    ids = [engine.submit(ask(engine, "Hello", max_tokens=200, ignore_eos=True)) for _ in range(4)]
    for request_id in ids[:2]:
        engine.cancel(request_id)
    assert all(engine.get_result(request_id, wait=60) for request_id in ids)
    texts = engine._delivery._texts
    assert texts is not None and not texts._texts


def test_a_decoding_error_fails_only_its_own_request() -> None:
    class Text:
        is_cut = False
        num_tokens = 0

        def __init__(self, params: SamplingParams) -> None:
            self._is_bad = params.seed == 1

        def add(self, output: TokenOutput) -> str:
            if self._is_bad:
                raise ValueError("no such token")
            return "x"

        def result(self, result: GenerationResult) -> GenerationResult:
            return result

    backend = NoopBackend()
    engine = ServingEngine(backend, ServingEngineConfig(cache=POOL), model=OpenedModel(backend, None, Text))
    bad = engine.submit(InferenceRequest((1, 2), SamplingParams(max_tokens=4, seed=1)))
    good = engine.submit(InferenceRequest((1, 2), SamplingParams(max_tokens=4, seed=2)))
    engine.run_until_idle()
    failed, done = engine.get_result(bad), engine.get_result(good)
    assert failed is not None and done is not None
    assert failed.state is RequestState.FAILED and "no such token" in str(failed.error)
    assert done.state is RequestState.COMPLETED
    engine.stop()


def make(overlap: bool = False, clock: VirtualClock | None = None, log: Path | None = None) -> ServingEngine:
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(max_chunk_tokens=4),
        cache=POOL,
        overlap=overlap,
        log_path=None if log is None else str(log),
    )
    return ServingEngine(NoopBackend(), config, clock=clock or VirtualClock(), seed=1)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_iteration_returns_the_outputs_that_it_delivers(overlap: bool) -> None:
    engine = make(overlap)
    received: list[TokenOutput] = []
    engine.submit_with_callback(
        InferenceRequest(tuple(range(30)), SamplingParams(max_tokens=3)), received.append
    )
    engine.submit_with_callback(InferenceRequest((1,), SamplingParams(max_tokens=2)), received.append)
    returned: list[TokenOutput] = []
    num_without = 0
    while engine.has_work:
        before = len(received)
        outputs = engine.run_iteration()
        assert outputs == received[before:]
        returned += outputs
        num_without += not outputs
    assert [output.is_final for output in returned].count(True) == 2 and len(returned) == 5
    assert num_without, "a prefill step has no output, but has_work stays true"
    assert engine.run_iteration() == []
    engine.stop()
    assert engine.run_iteration() == [] and not engine.has_work


def test_an_engine_that_is_stopped_with_requests_has_no_work() -> None:
    engine = make()
    engine.submit(InferenceRequest((1, 2), SamplingParams(max_tokens=100)))
    engine.run_iteration()
    engine.stop()
    assert not engine.has_work
    engine.run_until_idle()


def test_tokens_per_second_covers_the_last_ten_seconds() -> None:
    clock = VirtualClock()
    engine = make(clock=clock)

    def generate(tokens: int, seconds: float) -> None:
        engine.submit(InferenceRequest((1,), SamplingParams(max_tokens=tokens)))
        while engine.has_work:
            engine.run_iteration()
            clock.advance(seconds / tokens)

    generate(200, 20.0)
    assert engine.metrics().tokens_per_second == pytest.approx(10.0, rel=0.05)
    generate(1000, 10.0)
    assert engine.metrics().tokens_per_second == pytest.approx(100.0, rel=0.05)
    clock.advance(5.0)
    assert engine.metrics().tokens_per_second == pytest.approx(50.0, rel=0.25)
    clock.advance(1000.0)
    assert engine.metrics().tokens_per_second == 0.0
    assert engine.metrics().generated_tokens == 1200


def test_metadata_is_in_results_and_in_the_event_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = make(log=path)
    given = {"user": "someone", "tags": ["a", 2]}
    request = InferenceRequest((1, 2), SamplingParams(max_tokens=2, n=2), metadata=given)
    ids = [
        *engine.submit_choices(request),
        engine.submit(InferenceRequest((1,), SamplingParams(max_tokens=1))),
    ]
    strange: dict[str, object] = {"one": object(), "nested": {(1, 2): "x"}}
    strange["itself"] = strange
    ids.append(engine.submit(InferenceRequest((1,), SamplingParams(max_tokens=1), metadata=strange)))
    engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    assert [result.metadata for result in results if result] == [given, given, {}, strange]
    engine.stop()
    added = [
        one
        for line in path.read_text().splitlines()
        if (event := json.loads(line))["event"] == "add"
        for one in event["requests"]
    ]
    assert [one.get("metadata") for one in added[:3]] == [given, given, None]
    assert "object at" in added[3]["metadata"]
    assert replay(str(path)).requests == 4
