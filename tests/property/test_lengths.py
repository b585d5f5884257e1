"""The predictor of lengths: its quantiles are honest, its memory is bounded, and owners do not see each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.lengths import EDGES, MAX_CONTEXTS, LengthFeatures, LengthPredictor

MOST = 1000


def features(owner: str = "a", template: int = 1, max_tokens: int = MOST) -> LengthFeatures:
    return LengthFeatures(owner, template, tools=0, prompt_tokens=100, max_tokens=max_tokens)


def taught(lengths: list[int], **fields: object) -> LengthPredictor:
    predictor = LengthPredictor()
    for length in lengths:
        predictor.learn(features(**fields), length, was_cut=False)  # type: ignore[arg-type]
    return predictor


def _log_normal(source: random.Random) -> int:
    return max(1, round(source.lognormvariate(4, 1)))


DRAWS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": _log_normal,
    "uniform": lambda source: source.randint(1, 800),
    "geometric": lambda source: 1 + int(source.expovariate(1 / 60)),
    "always 5": lambda source: 5,
    "short or long": lambda source: source.randint(*((4, 20) if source.random() < 0.6 else (300, 500))),
}


@pytest.mark.parametrize("which", DRAWS)
def test_quantiles_are_honest(which: str) -> None:
    """Of the next answers, half are at most p50 and nine of ten at most p90. Equal lengths may only exceed the shares."""
    source, predictor = random.Random(which), LengthPredictor()
    below = {"p50": 0, "p90": 0}
    num_known, num_tested = 300, 2000
    for number in range(num_known + num_tested):
        length = min(MOST, DRAWS[which](source))
        expected = predictor.predict(features()).expected()
        if number >= num_known:
            below["p50"] += length <= expected.p50
            below["p90"] += length <= expected.p90
        predictor.learn(features(), length, was_cut=length == MOST)
    p50, p90 = (count / num_tested for count in below.values())
    if which == "always 5":
        assert p50 == p90 == 1
    else:
        assert 0.45 <= p50 <= 0.55, p50
        assert 0.87 <= p90 <= 0.93, p90


def test_few_answers_give_wide_quantiles_and_many_narrow_ones() -> None:
    ratios = []
    for count in (0, 1, 10, 500):
        expected = taught([100] * count, max_tokens=10**6).predict(features(max_tokens=10**6)).expected()
        ratios.append(expected.p90 / expected.p50)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 5 and ratios[-1] < 1.3


def test_the_kind_of_a_request_decides_and_an_unknown_kind_gets_the_mix_of_its_owner() -> None:
    predictor = LengthPredictor()
    for number in range(400):
        is_short = number % 2 == 0
        predictor.learn(features(template=int(is_short)), 10 if is_short else 400, was_cut=False)
    short, long, unknown = (predictor.predict(features(template=one)).mean for one in (1, 0, 2))
    assert short < 20 and 300 < long < 500
    assert 100 < unknown < 320


def test_cut_answers_count_as_longer_than_they_are() -> None:
    """Half of the requests allow 100 tokens only. The answers to the others show how long answers are after these."""
    source, predictor = random.Random(1), LengthPredictor()
    for number in range(1500):
        length = 1 + int(source.expovariate(1 / 200))
        most = 100 if number % 2 else MOST
        # The same context: the limit is a feature, so it must not tell the two apart here.
        predictor.learn(features(), min(length, most), was_cut=length > most)
    expected = predictor.predict(features()).expected()
    assert 0.8 * 139 < expected.p50 < 1.2 * 139
    assert 0.8 * 460 < expected.p90 < 1.2 * 460


def test_predictions_follow_traffic_that_changes() -> None:
    predictor = taught([400] * 2000)
    for _ in range(1500):
        predictor.learn(features(), 20, was_cut=False)
    assert predictor.predict(features()).expected().p50 < 30


def test_predictions_never_exceed_max_tokens() -> None:
    expected = taught([400] * 100).predict(features(max_tokens=50)).expected()
    assert max(expected.mean, expected.p50, expected.p90) <= 50


def test_the_memory_of_all_owners_and_of_each_is_bounded() -> None:
    predictor = LengthPredictor()
    for number in range(3 * MAX_CONTEXTS):
        predictor.learn(features(f"owner {number % 9}", template=number), 10, was_cut=False)
        predictor.learn(features("flood", template=number), 10, was_cut=False)
        assert predictor.num_contexts <= MAX_CONTEXTS
    held = {owner: len(contexts) for owner, contexts in predictor._owners.items()}
    assert sum(held.values()) == predictor.num_contexts
    assert held["flood"] <= MAX_CONTEXTS // 4


def test_a_flood_of_templates_leaves_the_contexts_of_other_owners() -> None:
    predictor = LengthPredictor()
    for _ in range(500):
        predictor.learn(features("a"), 30, was_cut=False)
    before = predictor.predict(features("a")).expected()
    for number in range(2 * MAX_CONTEXTS):
        predictor.learn(features("b", template=number), 900, was_cut=False)
    after = predictor.predict(features("a")).expected()
    assert (after.p50, after.p90) == (before.p50, before.p90)


def test_owners_with_the_same_template_share_only_the_lengths_of_all_answers() -> None:
    """What an owner without answers gets depends on the lengths of others, and not on their templates."""
    one, other = LengthPredictor(), LengthPredictor()
    for number in range(600):
        length = 10 if number % 2 else 500
        one.learn(features("b", template=number % 2), length, was_cut=False)
        other.learn(features("c", template=1), length, was_cut=False)
    found = [predictor.predict(features("a", template=1)).expected() for predictor in (one, other)]
    assert found[0] == found[1]


_Answer = st.tuples(
    st.integers(0, 3), st.integers(0, 3), st.integers(0, 2 * EDGES[-1]), st.booleans(), st.integers(1, 2**31)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_Answer, max_size=60), st.integers(1, 2**31), st.integers(0, 2**31), st.data())
def test_any_history_gives_quantiles_in_order(
    history: list[tuple[int, int, int, bool, int]], most: int, beyond: int, data: st.DataObject
) -> None:
    predictor = LengthPredictor()
    for owner, template, length, was_cut, max_tokens in history:
        predictor.learn(features(str(owner), template, max_tokens), length, was_cut=was_cut)
    distribution = predictor.predict(features("0", 0, most))
    expected = distribution.expected()
    assert 1 <= expected.p50 <= expected.p90 <= most
    assert 1 <= expected.mean <= most
    low, high = sorted((data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))))
    assert distribution.quantile(low) <= distribution.quantile(high)
    assert distribution.quantile(high, beyond) >= min(most, beyond + 1)
