"""The default model through the real engine: the tokens of a request do not depend on the batch, chunks or memory.

With the C++ kernels, tokens and logprobs are compared bit by bit. One test uses numpy in float64, where the order of
summation cannot change a token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from weft.backends.cpu import runner
from weft.backends.cpu.runner import CpuBackend, Native, open_native
from weft.config import (
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.gguf import GgufFile
from weft.loading.pull import pull
from weft.models.decoder import Decoder
from weft.models.registry import build_decoder
from weft.ops.base import StepIndices
from weft.ops.reference import ReferenceOps
from weft.request import GenerationResult, InferenceRequest, Priority, RequestState, SamplingParams
from weft.text.grammar import GrammarCompiler
from weft.text.model_text import open_tokenizer
from weft.text.tokenizer import Tokenizer

NEW_TOKENS = 7
SHARED = "Every morning the baker opened the shop before the sun came up over the hills, and"
TEXTS = [
    "The capital of France is",
    "A",
    "1, 2, 3, 4,",
    SHARED + " then",
    SHARED + " people",
    "def add(a, b):\n    return",
    "Water boils at one hundred degrees, and ice melts at",
    "Dear Sir or Madam,",
    "Once upon a time there was",
    "日本の首都は",
    "SELECT name FROM",
    "The three primary colours are",
    SHARED + " the street was quiet, but for the cat of the neighbours, which",
    "List of fruits:\n- apple\n-",
    "Q: How many legs has a spider?\nA:",
    "\n",
]
# Sixteen greedy requests, then the same texts with all sampling parameters.
SHAPES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {28: 2.0, 30: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 4},
]


@dataclasses.dataclass(frozen=True)
class Model:
    decoder: Decoder
    native: Native | None


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 2, None))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """32 mixed requests."""
    prompts = [tuple(default_tokenizer.encode(text)) for text in TEXTS]
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1}
    greedy = [SamplingParams(temperature=0.0, **common) for _ in prompts]  # type: ignore[arg-type]
    shaped = [SamplingParams(seed=i, **common, **SHAPES[i % len(SHAPES)]) for i in range(len(prompts))]  # type: ignore[arg-type]
    return [InferenceRequest(p, params) for p, params in zip(prompts * 2, greedy + shaped, strict=True)]


def make_engine(
    model: Model, *, blocks: int = 256, swap_blocks: int = 0, overlap: bool = False, **scheduler: object
) -> ServingEngine:
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(**{"max_running": 32, "prefix_caching": False, **scheduler}),  # type: ignore[arg-type]
        cache=KvCachePoolConfig(num_blocks=blocks, block_size=8, swap_blocks=swap_blocks),
        overlap=overlap,
    )
    ends = frozenset({2})
    compiler = GrammarCompiler(
        lambda: open_tokenizer(open_checkpoint(pull("default"))), ends, model.decoder.config.vocabulary_size
    )
    return ServingEngine(CpuBackend(model.decoder, ends, compiler, model.native), config)


def run(engine: ServingEngine, requests: Sequence[InferenceRequest]) -> list[GenerationResult]:
    ids = [engine.submit(request) for request in requests]
    while engine.has_work:
        engine.run_iteration()
        engine.scheduler.check_integrity()
    results = [engine.get_result(request_id) for request_id in ids]
    assert all(result is not None and result.state is RequestState.COMPLETED for result in results), results
    return results  # type: ignore[return-value]


def assert_equal(results: Sequence[GenerationResult], alone: Sequence[GenerationResult]) -> None:
    """The same tokens and logprobs, bit by bit."""
    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert [logprobs(result) for result in results] == [logprobs(result) for result in alone]


def logprobs(result: GenerationResult) -> list[float]:
    assert result.logprobs is not None
    return [value for one in result.logprobs for value in (one.logprob, one.top[0][1])]


@pytest.fixture(scope="module")
def alone(model: Model, requests: list[InferenceRequest]) -> list[GenerationResult]:
    """The result of each request when it runs alone."""
    engine = make_engine(model)
    results = [run(engine, [request])[0] for request in requests]
    engine.stop()
    return results


def test_cache_memory_is_prefaulted_while_idle_after_the_blocks_in_use(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, large_page = 3 << 20, 2 << 20
    monkeypatch.setattr(runner, "_CACHE_BYTES_AHEAD", ahead)
    engine = make_engine(model, blocks=128)
    memory = engine._backend._prefaulter  # type: ignore[attr-defined]

    def taken() -> int:
        ends = time.monotonic() + 60.0
        while memory.needs_more:
            assert time.monotonic() < ends
            time.sleep(1e-3)
        return memory._prefaulted

    assert ahead <= taken() < ahead + large_page
    # The request is so short that no step has time to prefault memory for similar ones.
    run(engine, [InferenceRequest(tuple(range(100, 130)), SamplingParams(max_tokens=8, ignore_eos=True))])
    block_bytes = engine.scheduler.info.bytes_per_block
    used = 5 * block_bytes  # 37 tokens in blocks of 8
    assert used + ahead <= taken() < used + ahead + large_page
    engine.stop()


def test_a_long_prefill_step_prefaults_memory_for_similar_requests(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_CACHE_BYTES_AHEAD", 0)
    engine = make_engine(model, blocks=512)
    backend: Any = engine._backend
    memory, pool = backend._prefaulter, backend._pool
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    run(engine, [InferenceRequest(tuple(range(100, 300)), once)])
    used = 25 * engine.scheduler.info.bytes_per_block  # 200 tokens in blocks of 8
    assert memory._prefaulted >= 3 * used, "the step prefaulted too little memory"
    assert not pool.withdraw_pages(), "an offer is open"

    offered: list[int] = []

    def broken(*_: object) -> NoReturn:
        offered.append(memory._offered)
        raise RuntimeError("no step today")

    monkeypatch.setattr(backend._forward, "step", broken)
    request_id = engine.submit(InferenceRequest(tuple(range(100, 500)), once))
    while engine.has_work:
        engine.run_iteration()
        engine.scheduler.check_integrity()
    result = engine.get_result(request_id)
    assert result is not None
    assert result.state is RequestState.FAILED
    assert "no step today" in str(result.error)
    assert memory._prefaulted < max(offered), (
        "memory that a failed step did not prefault counts as prefaulted"
    )
    assert not pool.withdraw_pages(), "an offer is open"
    engine.stop()


def test_tokens_equal_those_of_the_decoder_without_engine(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult]
) -> None:
    """The decoder computes the whole text again for every token, without engine, rows or batches."""
    assert model.native is not None
    request = requests[0]
    text = list(request.prompt)
    for _ in range(4):
        length = len(text)
        blocks = -(-length // 8)
        step = StepIndices(
            token_ids=np.array(text),
            positions=np.arange(length),
            cells=np.arange(length),
            query_starts=np.array([0, length]),
            context_lengths=np.array([length]),
            block_tables=np.arange(blocks)[None],
            logit_indices=np.array([length - 1]),
        )
        logits, _ = model.native.forward.step(step, model.decoder.new_cache(blocks, 8), 1)
        text.append(int(logits.argmax()))
    assert tuple(text[len(request.prompt) :]) == alone[0].tokens[:4]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_tokens_are_the_same_in_a_batch(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult], overlap: bool
) -> None:
    engine = make_engine(model, overlap=overlap)
    assert_equal(run(engine, requests), alone)
    engine.stop()


def test_numpy_gives_the_same_tokens_in_a_batch_as_alone(
    default_model_file: GgufFile, requests: list[InferenceRequest]
) -> None:
    ops = ReferenceOps(np.float64)
    decoder = build_decoder("gguf", default_model_file.metadata, default_model_file.tensors, ops)
    some = requests[:2] + requests[17:20]
    engine = make_engine(Model(decoder, None))
    alone = [run(engine, [request])[0] for request in some]
    together = run(engine, some)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), rtol=0, atol=1e-10)
    engine.stop()


def test_tokens_are_the_same_with_prompts_in_chunks_of_seven(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult]
) -> None:
    engine = make_engine(
        model, overlap=True, max_chunk_tokens=7, max_prefill_tokens=40, max_tokens_per_step=72
    )
    assert_equal(run(engine, requests), alone)
    engine.stop()


def test_tokens_are_the_same_with_a_prefix_hit(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult]
) -> None:
    engine = make_engine(model, overlap=True, prefix_caching=True)
    # Submitted together: the second request waits for the blocks of the shared prefix, or reads them.
    assert_equal(run(engine, requests[3:5]), alone[3:5])
    again = run(engine, requests)
    assert_equal(again, alone)
    assert again[12].cached_token_count >= 16 and again[19].cached_token_count >= 16
    assert again[3].cached_token_count >= 16 and again[4].cached_token_count >= 16
    engine.stop()


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_tokens_are_the_same_after_preemption(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult], mode: PreemptionMode
) -> None:
    # All 32 together need about 100 blocks, so the memory runs out while they generate.
    engine = make_engine(model, blocks=48, swap_blocks=64, overlap=True, preemption=mode)
    assert_equal(run(engine, requests), alone)
    stats = engine.stats()[0]
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0 and by_swap == 0
    assert stats.swaps_failed == 0 and stats.steps_failed == 0
    engine.stop()


def test_tokens_are_the_same_for_a_request_preempted_by_an_urgent_one(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult]
) -> None:
    engine = make_engine(model, blocks=4, overlap=True, policy=PriorityPolicy.PRIORITY)
    victim = engine.submit(requests[3])
    for _ in range(4):
        engine.run_iteration()
    urgent = InferenceRequest(requests[6].prompt, requests[6].params, priority=Priority.CRITICAL)
    assert_equal(run(engine, [urgent]), [alone[6]])
    result = engine.get_result(victim)
    assert result is not None and result.preemptions == 1
    assert_equal([result], [alone[3]])
    engine.stop()


def test_tokens_are_the_same_after_other_requests_are_cancelled(
    model: Model, requests: list[InferenceRequest], alone: list[GenerationResult]
) -> None:
    engine = make_engine(model, blocks=48, overlap=True, prefix_caching=True, max_chunk_tokens=16)
    ids = [engine.submit(request) for request in requests]
    gone = ids[1::3]
    for step, request_id in enumerate(gone):  # one per step: while waiting, in prefill, in decode
        engine.run_iteration()
        assert engine.cancel(request_id) or step > NEW_TOKENS
    kept = [index for index, request_id in enumerate(ids) if request_id not in gone]
    while engine.has_work:
        engine.run_iteration()
        engine.scheduler.check_integrity()
    results = [engine.get_result(ids[index]) for index in kept]
    assert_equal([result for result in results if result is not None], [alone[index] for index in kept])
    engine.stop()


def test_logprobs_of_a_prompt_are_the_same_in_chunks_and_in_a_batch(
    model: Model, requests: list[InferenceRequest]
) -> None:
    scored = [
        dataclasses.replace(one, params=dataclasses.replace(one.params, prompt_logprobs=2, max_tokens=1))
        for one in (requests[12], requests[4], requests[9])
    ]
    found = []
    for chunk, others in ((512, []), (7, requests[:2])):
        engine = make_engine(model, overlap=True, max_chunk_tokens=chunk)
        found.append(
            [result.prompt_logprobs or () for result in run(engine, [*scored, *others])[: len(scored)]]
        )
        engine.stop()
    for request, first, second in zip(scored, *found, strict=True):
        assert first[0] is None and len(first) == len(second) == len(request.prompt)
        for one, other in zip(first[1:], second[1:], strict=True):
            assert one is not None and other is not None
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.logprob == other.logprob


def test_a_request_with_nan_logits_fails_alone(
    model: Model,
    requests: list[InferenceRequest],
    alone: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of the logits becomes NaN during the run. That request fails; the others complete."""
    engine = make_engine(model, overlap=True)
    assert model.native is not None
    forward, calls = model.native.forward.step, []

    def broken(step: StepIndices, cache: np.ndarray, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        logits, rows = forward(step, cache, sampled)
        calls.append(sampled)
        if len(calls) == 4:
            logits[2] = np.nan
        return logits, rows

    monkeypatch.setattr(model.native.forward, "step", broken)
    ids = [engine.submit(request) for request in requests[:8]]
    engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    failed = [
        i for i, result in enumerate(results) if result is not None and result.state is RequestState.FAILED
    ]
    assert len(failed) == 1
    assert "not a number" in (results[failed[0]].error or "")  # type: ignore[union-attr]
    for index, result in enumerate(results):
        if index not in failed:
            assert result is not None and result.tokens == alone[index].tokens
    engine.stop()


def test_a_failed_step_is_retried(
    model: Model,
    requests: list[InferenceRequest],
    alone: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(model, overlap=True)
    assert model.native is not None
    forward, calls = model.native.forward.step, []

    def broken(step: StepIndices, cache: np.ndarray, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        calls.append(len(step.token_ids))
        if len(calls) == 3:
            raise MemoryError("no room for the activations")
        return forward(step, cache, sampled)

    monkeypatch.setattr(model.native.forward, "step", broken)
    assert_equal(run(engine, requests[:3]), alone[:3])
    assert engine.stats()[0].steps_failed == 1
    engine.stop()
