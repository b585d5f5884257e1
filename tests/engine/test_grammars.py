"""Grammars on the default model through the real engine: every answer matches its grammar and does not depend on the
batch.

The model computes in float64, so that tokens can be compared exactly. All tests but the last use only its first layers:
the quality of the answers does not matter.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest

from weft.backends.cpu.runner import CpuBackend
from weft.config import KvCachePoolConfig, PreemptionMode, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.llm import LLM
from weft.loading.gguf import GgufFile
from weft.models.decoder import Decoder
from weft.models.registry import build_decoder
from weft.ops.base import StepIndices
from weft.ops.reference import ReferenceOps
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import (
    FinishReason,
    GenerationResult,
    Grammar,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    numbered_ids,
)
from weft.text.grammar import GrammarCompiler
from weft.text.tokenizer import Tokenizer

ENDS = frozenset({0, 2})
RECORD = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["id"],
                "additionalProperties": False,
            },
            "maxItems": 1,
        },
    },
    "required": ["colour", "size", "parts"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(RECORD)),
    Grammar("regex", r"[A-Z][a-z]{2,4} \d{2}"),
    Grammar("choice", '["yes", "no", "perhaps not", "Größe"]'),
    Grammar("lark", 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{2}/'),
]
TEXTS = ["The capital of France is", "A", "List of fruits:\n- apple\n-", "Dear Sir or Madam,"]
SHAPES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_k": 30, "frequency_penalty": 0.5, "min_tokens": 3},
]
MAX_TOKENS = 8
LAYERS = 3


def is_record(text: str) -> bool:
    record = json.loads(text)
    return (
        list(record) == ["colour", "size", "parts"]
        and record["colour"] in ("red", "green")
        and 0 <= record["size"] <= 9
        and len(record["parts"]) <= 1
        and all(0 <= part["id"] <= 99 for part in record["parts"])
    )


CHECKS: list[Callable[[str], object]] = [
    is_record,
    re.compile(r"[A-Z][a-z]{2,4} [0-9]{2}").fullmatch,
    ["yes", "no", "perhaps not", "Größe"].__contains__,
    re.compile(r"(\(*)[0-9]{2}(\)*)").fullmatch,
]


class SkippingBackend(CpuBackend):
    """Rows with a grammar skip every second step, as if their masks had to wait for the host. Records the requests of
    each step."""

    steps: tuple[set[RequestId], ...] = ()

    def submit(self, plan: IterationPlan) -> Future[StepResult]:
        self.steps += (set(plan.request_ids),)
        return super().submit(plan)

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        return dataclasses.replace(super().allocate(pool, num_rows, max_tokens), grammars_may_overlap=False)


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
def compiler(decoder: Decoder, default_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: default_tokenizer, ENDS, decoder.config.vocabulary_size)


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """32 requests, every second one with a grammar."""
    made = []
    for index in range(16):
        prompt = tuple(default_tokenizer.encode(TEXTS[index % 4]))
        shape = SHAPES[index // 4]
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=index, logprobs=1, **shape)  # type: ignore[arg-type]
        with_grammar = dataclasses.replace(params, grammar=GRAMMARS[(index + index // 4) % 4])
        made += [InferenceRequest(prompt, with_grammar), InferenceRequest(prompt, params)]
    return made


@pytest.fixture
def make_engine(decoder: Decoder, compiler: GrammarCompiler) -> Callable[..., ServingEngine]:
    def make(
        backend: type[CpuBackend] = CpuBackend,
        *,
        blocks: int = 256,
        swap_blocks: int = 0,
        overlap: bool = True,
        **scheduler: object,
    ) -> ServingEngine:
        config = ServingEngineConfig(
            scheduler=SchedulerConfig(**{"max_running": 32, "prefix_caching": False, **scheduler}),  # type: ignore[arg-type]
            cache=KvCachePoolConfig(num_blocks=blocks, block_size=8, swap_blocks=swap_blocks),
            overlap=overlap,
        )
        return ServingEngine(backend(decoder, ENDS, compiler), config, new_id=numbered_ids())

    return make


def run(engine: ServingEngine, requests: Sequence[InferenceRequest]) -> list[GenerationResult]:
    ids = [engine.submit(request) for request in requests]
    while engine.has_work:
        engine.run_iteration()
        engine.scheduler.check_integrity()
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()
    assert all(result is not None and result.state is RequestState.COMPLETED for result in results), results
    return results  # type: ignore[return-value]


@pytest.fixture(scope="module")
def alone(
    decoder: Decoder, compiler: GrammarCompiler, requests: list[InferenceRequest]
) -> list[tuple[int, ...]]:
    """The tokens of each request when it runs alone."""
    cache = KvCachePoolConfig(num_blocks=16, block_size=8)
    engine = ServingEngine(CpuBackend(decoder, ENDS, compiler), ServingEngineConfig(cache=cache))
    ids = []
    for request in requests:
        ids.append(engine.submit(request))
        engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()
    return [result.tokens for result in results if result is not None]


def tokens(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def test_32_mixed_requests_get_the_same_tokens_as_alone_and_match_their_grammars(
    make_engine: Callable[..., ServingEngine],
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    default_tokenizer: Tokenizer,
) -> None:
    results = run(make_engine(), requests)
    assert tokens(results) == alone
    complete = 0
    for request, result in zip(requests, results, strict=True):
        grammar = request.params.grammar
        if grammar is not None and result.finish_reason is FinishReason.END_OF_SEQUENCE:
            complete += 1
            text = default_tokenizer.decode(result.tokens)
            assert CHECKS[GRAMMARS.index(grammar)](text), text
    assert complete >= 8, "most short answers are complete"


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_rows_that_skip_steps_get_the_same_tokens(
    make_engine: Callable[..., ServingEngine],
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    overlap: bool,
) -> None:
    engine = make_engine(SkippingBackend, overlap=overlap)
    assert tokens(run(engine, requests[:12])) == alone[:12]
    backend = engine._backend
    assert isinstance(backend, SkippingBackend)
    # Only while other rows keep a step in flight: alone, a row with a grammar is in every step.
    steps = pairwise(backend.steps[: MAX_TOKENS - 1])
    in_adjacent_steps = {request_id for before, after in steps for request_id in before & after}
    with_grammar = {str(index) for index in range(12) if requests[index].params.grammar is not None}
    assert in_adjacent_steps & with_grammar == (set() if overlap else with_grammar)
    assert in_adjacent_steps - with_grammar == set(map(str, range(12))) - with_grammar, (
        "rows without a grammar are in every step"
    )


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_grammar_continues_after_preemption(
    make_engine: Callable[..., ServingEngine],
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    mode: PreemptionMode,
) -> None:
    engine = make_engine(blocks=12, swap_blocks=32, preemption=mode, prefix_caching=True)
    assert tokens(run(engine, requests[::2])) == alone[::2]
    stats = engine.scheduler.stats
    assert stats.preemptions_by_swap if mode is PreemptionMode.SWAP else stats.preemptions_by_recompute


def test_a_grammar_continues_after_a_failed_step(
    make_engine: Callable[..., ServingEngine],
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, calls = decoder.forward, []

    def broken(step: StepIndices, cache: np.ndarray) -> np.ndarray:
        calls.append(len(step.token_ids))
        if len(calls) == 4:
            raise MemoryError("no room for the activations")
        return forward(step, cache)

    monkeypatch.setattr(decoder, "forward", broken)
    engine = make_engine()
    assert tokens(run(engine, requests[:6])) == alone[:6]
    assert engine.scheduler.stats.steps_failed == 1


def test_29_a_grammar_that_fails_during_the_answer_fails_only_its_request(
    make_engine: Callable[..., ServingEngine],
    requests: list[InferenceRequest],
    alone: list[tuple[int, ...]],
) -> None:
    engine = make_engine()
    endless = SamplingParams(
        max_tokens=16, temperature=0, grammar=Grammar("regex", "(([a-z]{0,999}){0,999}){0,999}")
    )
    failing = engine.submit(InferenceRequest(requests[0].prompt, endless))
    assert tokens(run(engine, requests[:6])) == alone[:6]
    result = engine.get_result(failing)
    assert result is not None and result.state is RequestState.FAILED
    assert "cannot be followed any further" in (result.error or "")
    assert len(result.tokens) < 16


def test_an_invalid_grammar_is_refused_at_submit(
    make_engine: Callable[..., ServingEngine], requests: list[InferenceRequest]
) -> None:
    engine = make_engine()
    wrong = InferenceRequest(requests[0].prompt, SamplingParams(grammar=Grammar("regex", "a(")))
    for take in (engine.submit, engine.submit_choices, engine.check):
        with pytest.raises(InvalidRequestError, match="unclosed group") as refused:
            take(wrong)
        assert refused.value.field == "grammar"
    assert not engine.scheduler.has_work
    engine.stop()


def test_several_answers_of_an_llm_are_complete_and_match_a_schema(default_model_path: str) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.2, seed=7, n=2, grammar=GRAMMARS[0])
    with LLM(str(default_model_path), max_context=512) as llm:
        [result] = llm.generate("A red thing as JSON: ", params)
        for choice in result.choices:
            assert choice.finish_reason is FinishReason.END_OF_SEQUENCE
            assert is_record(choice.text)
        chosen = llm.generate("Is it so?", SamplingParams(grammar=GRAMMARS[2], temperature=0))[0]
        assert chosen.text in ("yes", "no", "perhaps not", "Größe")
        with pytest.raises(InvalidRequestError, match="cannot be used"):
            llm.generate("x", SamplingParams(grammar=Grammar("lark", "start:: x")))
