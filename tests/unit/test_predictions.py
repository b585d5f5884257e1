"""Draft tokens from the prediction of a request: the same answer, in fewer steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafts import WRONG, Script

from weft.engine.ipc import wire
from weft.errors import InvalidRequestError
from weft.request import MAX_PREDICTION, InferenceRequest, RequestId
from weft.scheduling.draft_tokens import PREDICTED_ACCEPTANCE, SEARCH_WINDOW, DraftProposer

PROMPT = (900, 901)
TEXT = tuple(range(100, 160))


class Predicting(Script):
    """A script of one request with a prediction."""

    def predict(self, answer: tuple[int, ...], prediction: tuple[int, ...]) -> int:
        """Runs the request to its end and returns the number of steps."""
        self.add(PROMPT, answer, prediction=prediction)
        self.run()
        assert self.reported() == list(answer)
        return len(self.plans)

    def counts(self) -> tuple[int, int]:
        result = self.results[RequestId("0")]
        return result.accepted_prediction_count, result.rejected_prediction_count


def test_an_answer_that_equals_its_prediction_needs_one_step_for_twelve_tokens() -> None:
    script = Predicting()
    steps = script.predict(TEXT, TEXT)
    assert steps == 1 + -(-(len(TEXT) - 1) // 12)
    accepted, rejected = script.counts()
    assert accepted == len(TEXT) - steps and rejected == 0


def test_without_a_match_the_prediction_costs_one_step_with_rejected_draft_tokens_at_most() -> None:
    script = Predicting()
    steps = script.predict(TEXT, tuple(range(200, 260)))
    assert steps == len(TEXT)
    assert script.counts() == (0, 0), "the first token was wrong before any step had draft tokens"
    second = Predicting()
    second.predict(TEXT, (TEXT[0], *range(200, 260)))
    accepted, rejected = second.counts()
    assert accepted == 0 and 0 < rejected <= 11


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("replaced", (*TEXT[:20], 500, *TEXT[21:])),
        ("inserted", (*TEXT[:20], 500, 501, 502, *TEXT[20:])),
        ("left out", (*TEXT[:20], *TEXT[35:])),
        ("at the start", (500, 501, *TEXT)),
    ],
)
def test_after_a_change_the_draft_tokens_follow_the_prediction_again(
    name: str, answer: tuple[int, ...]
) -> None:
    script = Predicting()
    steps = script.predict(answer, TEXT)
    assert steps < len(answer) / 3, name
    accepted, _ = script.counts()
    assert accepted >= len(answer) - steps - 3


def test_an_accidental_match_far_ahead_does_not_lose_the_place() -> None:
    common = (1, 2)
    prediction = (*TEXT[:20], *common, *TEXT[20:40], *common, *TEXT[40:])
    # The answer has the pair earlier than the prediction, so the first match is an accident.
    answer = (*TEXT[:10], *common, 500, *TEXT[10:20], *common, *TEXT[20:40], *common, *TEXT[40:])
    script = Predicting()
    assert script.predict(answer, prediction) < len(answer) / 2.5


def test_a_prediction_that_ends_early_proposes_nothing_beyond_its_end() -> None:
    script = Predicting()
    script.predict(TEXT, TEXT[:5])
    assert script.counts() == (4, 0)
    assert max(len(drafts) for plan in script.plans for drafts in plan.drafts) == 4


def test_without_draft_tokens_a_prediction_has_no_effect() -> None:
    script = Predicting(max_draft_tokens=0)
    assert script.predict(TEXT, TEXT) == len(TEXT)
    assert script.counts() == (0, 0)


def test_a_stop_token_in_the_prediction_is_never_a_draft_token() -> None:
    script = Predicting(eos=frozenset({99}))
    script.predict((*TEXT[:6], 99), (*TEXT[:6], 99, *TEXT[6:]))
    assert not any(99 in drafts for plan in script.plans for drafts in plan.drafts)


tokens = st.lists(st.sampled_from((3, 4, 5, WRONG)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(tokens, st.lists(st.sampled_from((3, 4, 5)), max_size=40), st.integers(1, 11))
def test_the_answer_is_the_same_with_any_prediction(
    answer: list[int], prediction: list[int], most: int
) -> None:
    script = Predicting(max_draft_tokens=most)
    script.predict(tuple(answer), tuple(prediction))
    accepted, rejected = script.counts()
    stats = script.scheduler.stats
    assert accepted <= stats.drafts_accepted and accepted + rejected <= stats.tokens_drafted
    assert bool(prediction) or accepted == rejected == 0


@settings(max_examples=150, deadline=None)
@given(tokens, tokens, st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_every_proposal_continues_the_text_or_the_prediction(
    generated: list[int], prediction: list[int], pieces: list[int]
) -> None:
    text, left = [1, 2], iter(generated)
    proposer = DraftProposer(text, tuple(prediction))
    assert proposer.propose(5) == tuple(prediction[:5])
    for count in pieces:
        text += itertools.islice(left, count)
        proposer.update()
        proposed = list(proposer.propose(5))
        if not proposed:
            continue
        length = len(text) - 2
        begins_alike = text[2:] == prediction[:length] and prediction[length:][:5] == proposed
        found = [*text[-2:], *proposed]
        assert begins_alike or any(
            source[at : at + len(found)] == found
            for source in (prediction, text + proposed)
            for at in range(len(source))
            if source is prediction or at < len(text) - 2
        )


def test_the_search_in_a_prediction_is_bounded() -> None:
    far = (*range(1000, 1000 + SEARCH_WINDOW), 7, 8, 9)
    assert not DraftProposer([1, 7, 8], ()).has_match
    text = [1, 5]
    proposer = DraftProposer(text, far)
    text += [7, 8]
    proposer.update()
    assert not proposer.has_match
    near = DraftProposer(text, far[10:])
    text += [7, 8]
    near.update()
    assert near.propose(1) == (9,)


def test_each_answer_of_a_request_follows_the_prediction_independently() -> None:
    first, second = [1], [1]
    proposer = DraftProposer(first, (5, 6, 7))
    sibling = proposer.sibling(second)
    first.append(5)
    second.append(8)
    proposer.update()
    sibling.update()
    assert proposer.propose(2) == (6, 7) and sibling.propose(2) == ()
    assert proposer.acceptance_rate > PREDICTED_ACCEPTANCE > sibling.acceptance_rate


def test_a_prediction_is_checked_and_travels_to_the_engine() -> None:
    request = InferenceRequest((1,), prediction=[2, 3])  # type: ignore[arg-type]
    message = wire.to_engine.decode(wire.encode(wire.Submit.of((0,), request)))
    assert isinstance(message, wire.Submit) and message.whole_request == request
    assert request.prediction == (2, 3)
    for bad in ("ab", 5, [True], [1.5], [0] * (MAX_PREDICTION + 1)):
        with pytest.raises(InvalidRequestError) as error:
            InferenceRequest((1,), prediction=bad)  # type: ignore[arg-type]
        assert error.value.field == "prediction"
    script = Script()
    with pytest.raises(InvalidRequestError, match="prediction holds token id 1000; allowed: 0 to 999"):
        script.scheduler.check(InferenceRequest((1,), prediction=(1000,)))
