"""The default model with predictions: the same answers bit by bit, and far fewer steps where a prediction is right."""

from __future__ import annotations

import pytest
from test_real_model import Model, run
from test_real_model_drafts import FREE_ROWS, set_step_cost
from test_real_model_tiers import make_engine

from weft.backends.cpu.runner import open_native
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.request import GenerationResult, InferenceRequest, SamplingParams
from weft.text.tokenizer import Tokenizer

NEW_TOKENS = 48
PROMPT = "The history of the city of Lisbon begins"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 1, None))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_with_its_own_answer_as_prediction_a_request_gets_the_same_answer_in_a_quarter_of_the_steps(
    model: Model, default_tokenizer: Tokenizer, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2, temperature=temperature, seed=5
    )
    request = InferenceRequest(tuple(default_tokenizer.encode(PROMPT)), params)

    def answer(max_draft_tokens: int, prediction: tuple[int, ...]) -> tuple[GenerationResult, int]:
        engine = make_engine(model, None, blocks=64, max_draft_tokens=max_draft_tokens)
        [result] = run(engine, [request.replaced(prediction=prediction)])
        steps = engine.stats()[0].steps
        engine.stop()
        return result, steps

    plain, plain_steps = answer(0, ())
    assert plain_steps == NEW_TOKENS
    same, same_steps = answer(11, plain.tokens)
    assert (same.tokens, same.logprobs) == (plain.tokens, plain.logprobs)
    assert same_steps <= NEW_TOKENS // 4
    assert same.accepted_prediction_count == NEW_TOKENS - same_steps
    assert same.rejected_prediction_count == 0
    # Two words are replaced: the prediction is used again after each.
    edited = (*plain.tokens[:10], 500, *plain.tokens[11:30], 600, 601, *plain.tokens[31:])
    other, other_steps = answer(11, edited)
    assert (other.tokens, other.logprobs) == (plain.tokens, plain.logprobs)
    assert other_steps <= NEW_TOKENS // 2 and other.rejected_prediction_count > 0
    wrong, _ = answer(11, tuple(default_tokenizer.encode("Quite another text about fish and chips. " * 3)))
    assert (wrong.tokens, wrong.logprobs) == (plain.tokens, plain.logprobs)
