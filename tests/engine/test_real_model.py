"""The default model through the real engine: a request's tokens do not depend on company, chunks or memory.

In float64, where the order of summation cannot change a token: what is compared here is the engine's arithmetic of
positions, blocks and rows over a real forward pass. The first layers of the model are enough for that and keep the
tests short; all of its layers run in tests/parity.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from weft.backends.cpu.runner import CpuBackend
from weft.config import KvCachePoolConfig, PreemptionMode, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.gguf import GgufFile
from weft.models.decoder import Decoder
from weft.models.registry import build_decoder
from weft.ops.base import StepIndices
from weft.ops.reference import ReferenceOps
from weft.request import GenerationResult, InferenceRequest, Priority, RequestState, SamplingParams
from weft.text.tokenizer import Tokenizer

LAYERS = 6
NEW_TOKENS = 10
SHARED = "Every morning the baker opened the shop before the sun came up over the hills, and"
TEXTS = [
    "The capital of France is",
    "A",
    "1, 2, 3, 4,",
    SHARED + " then",
    SHARED + " nobody",
    "def add(a, b):\n    return",
    "Water boils at one hundred degrees, and ice melts at",
    "Dear Sir or Madam,",
]


@pytest.fixture(scope="module")
def decoder(default_model_file: GgufFile) -> Decoder:
    metadata = {**default_model_file.metadata, "llama.block_count": LAYERS}
    tensors = {
        name: tensor
        for name, tensor in default_model_file.tensors.items()
        if not name.startswith("blk.") or int(name.split(".")[1]) < LAYERS
    }
    return build_decoder("gguf", metadata, tensors, ReferenceOps(np.float64))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """Greedy and drawn ones in turn."""
    return [
        InferenceRequest(
            tuple(default_tokenizer.encode(text)),
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7 * (i % 2), seed=i, ignore_eos=True),
        )
        for i, text in enumerate(TEXTS)
    ]


def make_engine(
    decoder: Decoder, *, blocks: int = 64, swap_blocks: int = 0, overlap: bool = False, **scheduler: object
) -> ServingEngine:
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(**{"max_running": 8, "prefix_caching": False, **scheduler}),  # type: ignore[arg-type]
        cache=KvCachePoolConfig(num_blocks=blocks, block_size=8, swap_blocks=swap_blocks),
        overlap=overlap,
    )
    return ServingEngine(CpuBackend(decoder, frozenset({2})), config)


def run(engine: ServingEngine, requests: Sequence[InferenceRequest]) -> list[GenerationResult]:
    ids = [engine.submit(request) for request in requests]
    while engine.run_iteration():
        engine.scheduler.check_integrity()
    results = [engine.get_result(request_id) for request_id in ids]
    assert all(result is not None and result.state is RequestState.COMPLETED for result in results), results
    return results  # type: ignore[return-value]


def tokens(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def alone(decoder: Decoder, requests: list[InferenceRequest]) -> list[tuple[int, ...]]:
    """Each request with the engine to itself."""
    engine = make_engine(decoder)
    result = [run(engine, [request])[0].tokens for request in requests]
    engine.stop()
    return result


def test_tokens_equal_those_of_the_bare_decoder(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]]
) -> None:
    """Without engine, rows or batches: the whole text computed anew for every token."""
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
        rows = decoder.forward(step, decoder.new_cache(blocks, 8))
        text.append(int(decoder.logits(rows).argmax()))
    assert tuple(text[len(request.prompt) :]) == alone[0][:4]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_tokens_are_the_same_in_a_batch(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]], overlap: bool
) -> None:
    engine = make_engine(decoder, overlap=overlap)
    assert tokens(run(engine, requests)) == alone
    engine.stop()


def test_tokens_are_the_same_with_prompts_in_chunks_of_seven(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]]
) -> None:
    engine = make_engine(
        decoder, overlap=True, max_chunk_tokens=7, max_prefill_tokens=16, max_tokens_per_step=24
    )
    assert tokens(run(engine, requests)) == alone
    engine.stop()


def test_tokens_are_the_same_with_a_prefix_hit(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]]
) -> None:
    engine = make_engine(decoder, overlap=True, prefix_caching=True)
    # In one step: the second of the two that share a prefix waits for, or reads, the blocks of the first.
    assert tokens(run(engine, requests[3:5])) == alone[3:5]
    again = run(engine, requests)
    assert tokens(again) == alone
    assert again[3].cached_token_count >= 16 and again[4].cached_token_count >= 16
    engine.stop()


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_tokens_are_the_same_after_preemption(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]], mode: PreemptionMode
) -> None:
    # All eight need 24 blocks at their ends: memory runs out while they generate.
    engine = make_engine(decoder, blocks=14, swap_blocks=32, overlap=True, preemption=mode)
    assert tokens(run(engine, requests)) == alone
    stats = engine.stats()[0]
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0 and by_swap == 0
    assert stats.swaps_failed == 0 and stats.steps_failed == 0
    engine.stop()


def test_tokens_are_the_same_for_a_victim_of_an_urgent_request(
    decoder: Decoder, requests: list[InferenceRequest], alone: list[tuple[int, ...]]
) -> None:
    engine = make_engine(decoder, blocks=5, overlap=True)
    victim = engine.submit(requests[3])
    for _ in range(4):
        engine.run_iteration()
    urgent = InferenceRequest(requests[6].prompt, requests[6].params, priority=Priority.CRITICAL)
    assert tokens(run(engine, [urgent])) == [alone[6]]
    result = engine.get_result(victim)
    assert result is not None and result.preemptions == 1
    assert result.tokens == alone[3]
    engine.stop()


def test_a_request_with_broken_numbers_fails_alone(
    decoder: Decoder,
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row turns into NaN in the middle: that request ends in error, the others as ever."""
    engine = make_engine(decoder, overlap=True)
    forward, calls = decoder.forward, []

    def broken(step: StepIndices, cache: np.ndarray) -> np.ndarray:
        rows = forward(step, cache)
        calls.append(len(rows))
        if len(calls) == 4:
            rows[2] = np.nan
        return rows

    monkeypatch.setattr(decoder, "forward", broken)
    ids = [engine.submit(request) for request in requests]
    engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    failed = [
        i for i, result in enumerate(results) if result is not None and result.state is RequestState.FAILED
    ]
    assert len(failed) == 1
    assert "not a number" in (results[failed[0]].error or "")  # type: ignore[union-attr]
    for index, result in enumerate(results):
        if index not in failed:
            assert result is not None and result.tokens == alone[index]
    engine.stop()


def test_a_step_that_breaks_down_is_tried_again(
    decoder: Decoder,
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(decoder, overlap=True)
    forward, calls = decoder.forward, []

    def broken(step: StepIndices, cache: np.ndarray) -> np.ndarray:
        calls.append(len(step.token_ids))
        if len(calls) == 3:
            raise MemoryError("no room for the activations")
        return forward(step, cache)

    monkeypatch.setattr(decoder, "forward", broken)
    assert tokens(run(engine, requests[:3])) == alone[:3]
    assert engine.stats()[0].steps_failed == 1
    engine.stop()
