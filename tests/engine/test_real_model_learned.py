"""The default model with draft tokens from finished answers: the same tokens and logprobs as without, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from test_real_model import Model, run
from test_real_model_drafts import FREE_ROWS, SHAPES, assert_same, set_step_cost
from test_real_model_tiers import make_engine

from weft.backends.cpu.runner import open_native
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.request import GenerationResult, InferenceRequest, SamplingParams
from weft.text.tokenizer import Tokenizer

NEW_TOKENS = 24
TEXTS = (
    "The harbour was quiet that morning, and",
    "def area(shape):",
    "Dear Anna, thank you for your order of",
)
"""Nothing in them is repeated, so the own text of an answer gives few draft tokens."""


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 1, None))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """All shapes of parameters, with two seeds. Where tokens are drawn, the answers of one prompt begin alike at most."""
    encoded = [tuple(default_tokenizer.encode(text)) for text in TEXTS]
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 2}
    return [
        InferenceRequest(encoded[number % len(TEXTS)], SamplingParams(seed=seed, **common, **shape))
        for seed in (1, 2)
        for number, shape in enumerate(SHAPES.values())
    ]


@pytest.fixture(scope="module")
def plain(model: Model, requests: list[InferenceRequest]) -> list[GenerationResult]:
    """The results without draft tokens."""
    engine = make_engine(model, None, blocks=256, max_running=32, max_draft_tokens=0)
    results = run(engine, requests)
    engine.stop()
    return results


def learned(engine: ServingEngine) -> tuple[int, int]:
    stats = engine.stats()[0]
    assert stats.steps_failed == 0
    return stats.learned_drafts, stats.learned_drafts_accepted


def test_an_answer_that_follows_an_earlier_one_has_the_same_bits_in_fewer_steps(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=64)
    steps = []
    for _ in range(2):
        before = engine.stats()[0].steps
        for request, expected in zip(requests, plain, strict=True):
            assert_same(run(engine, [request]), [expected])
        steps.append(engine.stats()[0].steps - before)
    drafts, accepted = learned(engine)
    assert 0 < accepted < drafts, "some were accepted, some rejected"
    assert steps[1] < 0.7 * steps[0]
    engine.stop()


def test_in_a_batch_answers_that_follow_earlier_ones_have_the_same_bits(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=256, max_running=32)
    assert_same(run(engine, requests), plain)
    before = learned(engine)
    assert_same(run(engine, requests), plain)
    drafts, accepted = (b - a for a, b in zip(before, learned(engine), strict=True))
    assert len(requests) < accepted < drafts
    engine.stop()


def test_without_memory_for_answers_none_is_followed(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=64, max_learned_bytes=0)
    for _ in range(2):
        assert_same(run(engine, requests[:2]), plain[:2])
    assert learned(engine) == (0, 0)
    engine.stop()
