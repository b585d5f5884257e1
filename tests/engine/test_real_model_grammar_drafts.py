"""Answers of the default model under grammars, with and without draft tokens: the same tokens and logprobs, bit by bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_real_model import Model, run
from test_real_model_drafts import FREE_ROWS, assert_same, set_step_cost
from test_real_model_tiers import make_engine

from weft.backends.cpu.runner import open_native
from weft.config import PreemptionMode
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.ops.base import StepIndices
from weft.request import (
    FinishReason,
    GenerationResult,
    Grammar,
    InferenceRequest,
    RequestState,
    SamplingParams,
)
from weft.text.tokenizer import Tokenizer

MAX_TOKENS = 40
RECORD = {
    "type": "object",
    "properties": {
        "identification_number": {"type": "integer", "minimum": 0, "maximum": 999},
        "preferred_contact_method": {"enum": ["email", "telephone", "postal_service"]},
        "is_subscribed": {"type": "boolean"},
    },
    "required": ["identification_number", "preferred_contact_method", "is_subscribed"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(RECORD)),
    Grammar(
        "json_schema", '{"type": "array", "items": {"enum": ["red colour", "green colour"]}, "maxItems": 4}'
    ),
    Grammar("regex", r"Number \d{2}, then number \d{2}, and so on(, and so on){2}"),
    Grammar("choice", '["an answer that is certain", "an answer that is doubtful", "no"]'),
]
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_k": 30, "frequency_penalty": 0.5, "min_tokens": 3},
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 1, None))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """Sixteen requests with grammars, and four without. Their prompts repeat themselves, so n-grams give draft tokens
    too, many of which the grammars forbid."""
    made = []
    for index in range(20):
        text = [
            "a certain answer, a certain answer, a",
            '{"identification_number": 7}, {"',
            "red, green, red,",
        ][index % 3]
        grammar = GRAMMARS[(index + index // 4) % 4] if index < 16 else None
        params = SamplingParams(
            max_tokens=MAX_TOKENS, seed=index, logprobs=1, grammar=grammar, **SHAPES[index // 4 % 4]
        )
        made.append(InferenceRequest(tuple(default_tokenizer.encode(text)), params))
    return made


@pytest.fixture(scope="module")
def plain(model: Model, requests: list[InferenceRequest]) -> list[GenerationResult]:
    """The results without draft tokens."""
    engine = make_engine(model, None, blocks=256, max_running=32, max_draft_tokens=0)
    results = run(engine, requests)
    assert engine.stats()[0].tokens_drafted == 0
    engine.stop()
    return results


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)


def assert_drafted(engine: ServingEngine) -> None:
    stats = engine.stats()[0]
    assert 0 < stats.drafts_accepted < stats.tokens_drafted
    engine.stop()


@pytest.mark.usefixtures("free_rows")
def test_alone_every_request_gets_the_same_tokens_in_fewer_steps(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    default_tokenizer: Tokenizer,
) -> None:
    engine = make_engine(model, None, blocks=64)
    num_steps = 0
    for request, expected in zip(requests[:16], plain, strict=False):
        before = engine.stats()[0].steps
        assert_same(run(engine, [request]), [expected])
        num_steps += engine.stats()[0].steps - before
    assert num_steps < 0.6 * sum(len(result.tokens) for result in plain[:16])
    complete = [
        json.loads(default_tokenizer.decode(result.tokens))
        for request, result in zip(requests, plain, strict=True)
        if request.params.grammar == GRAMMARS[0] and result.finish_reason is FinishReason.END_OF_SEQUENCE
    ]
    assert complete and all(list(one) == list(RECORD["properties"]) for one in complete)  # type: ignore[call-overload]
    assert_drafted(engine)


@pytest.mark.usefixtures("free_rows")
def test_forced_tokens_alone_are_draft_tokens_and_all_are_accepted(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.scheduling.draft_tokens.DraftProposer._find", lambda self: -1)
    engine = make_engine(model, None, blocks=64)
    assert_same([run(engine, [request])[0] for request in requests], plain)
    stats = engine.stats()[0]
    assert stats.drafts_accepted == stats.tokens_drafted > 0.2 * sum(len(one.tokens) for one in plain[:16])
    engine.stop()


@pytest.mark.usefixtures("free_rows")
@pytest.mark.parametrize("count", [8, 20])
def test_in_a_batch_every_request_gets_the_same_tokens(
    model: Model, requests: list[InferenceRequest], plain: list[GenerationResult], count: int
) -> None:
    engine = make_engine(model, None, blocks=256, max_running=32)
    assert_same(run(engine, requests[-count:]), plain[-count:])
    assert_same(run(engine, requests[:count]), plain[:count])  # now with draft tokens from finished answers
    assert_drafted(engine)


@pytest.mark.usefixtures("free_rows")
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_after_preemption_every_request_gets_the_same_tokens(
    model: Model, requests: list[InferenceRequest], plain: list[GenerationResult], mode: PreemptionMode
) -> None:
    engine = make_engine(
        model, None, blocks=24, swap_blocks=64, max_running=32, preemption=mode, max_chunk_tokens=7
    )
    assert_same(run(engine, requests), plain)
    stats = engine.stats()[0]
    assert stats.preemptions_by_swap if mode is PreemptionMode.SWAP else stats.preemptions_by_recompute
    assert_drafted(engine)


@pytest.mark.usefixtures("free_rows")
def test_with_two_tiers_every_request_gets_the_same_tokens(
    model: Model, requests: list[InferenceRequest]
) -> None:
    bare = make_engine(model, 8, max_draft_tokens=0)
    expected = run(bare, requests[:6])
    bare.stop()
    engine = make_engine(model, 8)
    assert_same(run(engine, requests[:6]), expected)
    assert_drafted(engine)


@pytest.mark.usefixtures("free_rows")
@pytest.mark.parametrize("failing", range(2, 12, 3))
def test_after_a_failed_step_every_request_gets_the_same_tokens(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    failing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert model.native is not None
    forward, num_steps = model.native.forward.step, 0

    def broken(step: StepIndices, cache: np.ndarray, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == failing:
            raise MemoryError("no room for the activations")
        return forward(step, cache, sampled)

    monkeypatch.setattr(model.native.forward, "step", broken)
    engine = make_engine(model, None)
    assert_same(run(engine, requests[:4]), plain[:4])
    stats = engine.stats()[0]
    assert stats.steps_failed == 1 and stats.drafts_accepted > 0
    engine.stop()


@pytest.mark.usefixtures("free_rows")
def test_a_grammar_that_fails_after_draft_tokens_fails_only_its_request(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    default_tokenizer: Tokenizer,
) -> None:
    prompt = tuple(default_tokenizer.encode("abcdefghijkl mnop " * 4))
    endless = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, grammar=Grammar("regex", "(([a-z]{0,999}){0,999}){0,999}")
    )
    engine = make_engine(model, None)
    failing = engine.submit(InferenceRequest(prompt, endless))
    assert_same(run(engine, requests[:6]), plain[:6])
    result = engine.get_result(failing)
    assert result is not None and result.state is RequestState.FAILED
    assert "cannot be followed any further" in (result.error or "")
    assert_drafted(engine)
