"""When a refused client should retry, on a virtual clock."""

from __future__ import annotations

import pytest

from weft.clock import VirtualClock
from weft.lengths import LengthDistribution, LengthFeatures, LengthPredictor
from weft.server.admission.waiting import Place, WaitEstimate, retry_after

SECONDS_PER_TOKEN = 2.0


def always(length: int) -> LengthDistribution:
    predictor, features = LengthPredictor(), LengthFeatures("", 0, 0, 1, 10_000)
    for _ in range(2000):
        predictor.learn(features, length, was_cut=False)
    return predictor.predict(features)


def estimate(clock: VirtualClock) -> WaitEstimate:
    waits = WaitEstimate(clock, is_shortest_first=False)
    for _ in range(500):
        waits.record(0.0, 100 * SECONDS_PER_TOKEN, 100)
    return waits


def at(*num_tokens: int) -> list[Place]:
    """Places with answers of five tokens, each of which takes two seconds."""
    return [Place(FIVE, num) for num in num_tokens]


FIVE = always(5)


def wait(
    waits: WaitEstimate,
    places: list[Place],
    newcomer: LengthDistribution = FIVE,
    needed: int = 1,
    scope: str = "",
    is_promise: bool = True,
) -> float:
    return waits.seconds_until_free(
        scope, len(places), lambda: (places, newcomer), needed, is_promise=is_promise
    )


def test_each_refused_client_is_named_the_time_at_which_its_own_place_is_free() -> None:
    waits = estimate(VirtualClock())
    named = [wait(waits, at(3, 4, 1, 2), FIVE) for _ in range(4)]
    assert named == pytest.approx([2, 4, 6, 8], abs=0.1)


def test_a_place_that_becomes_free_is_taken_by_the_next_client_and_free_again_after_its_answer() -> None:
    waits, one_token = estimate(VirtualClock()), always(1)
    named = [wait(waits, at(4, 2), one_token) for _ in range(5)]
    assert named == pytest.approx([2, 4, 6, 6, 8], abs=0.1)


def test_a_request_that_waits_for_the_engine_comes_after_those_that_run() -> None:
    waits = estimate(VirtualClock())
    assert wait(waits, at(4, 0, 0), FIVE, needed=2) == pytest.approx(12, abs=0.1)


def test_several_places_may_be_needed_and_several_answers_end_with_the_last() -> None:
    waits = estimate(VirtualClock())
    assert wait(waits, at(3, 4, 1, 2), FIVE, needed=3) == pytest.approx(6, abs=0.1)
    predictor, features = LengthPredictor(), LengthFeatures("", 0, 0, 1, 10_000)
    for number in range(2000):
        predictor.learn(features, 1 if number % 4 else 5, was_cut=False)
    mixed = predictor.predict(features)
    found = [wait(estimate(VirtualClock()), [Place(mixed, 0, n)], mixed) for n in (1, 10)]
    assert found == pytest.approx([2, 10], abs=0.1)


def test_a_probe_does_not_count_as_a_client() -> None:
    waits = estimate(VirtualClock())
    for _ in range(50):
        found = wait(waits, at(4, 1), FIVE, is_promise=False)
        assert found == pytest.approx(2, abs=0.1)


def test_clients_no_longer_count_once_they_are_accepted_refused_again_or_late() -> None:
    clock = VirtualClock()
    waits = estimate(clock)

    def refused() -> float:
        return wait(waits, at(4, 1), FIVE)

    assert [refused(), refused()] == pytest.approx([2, 8], abs=0.1)
    waits.accepted("")
    assert refused() == pytest.approx(8, abs=0.1), "one client is ahead, and no longer two"
    clock.advance(9)  # the times of both have passed: the next two refusals are theirs
    assert [refused(), refused()] == pytest.approx([8, 8], abs=0.1)
    clock.advance(30)  # none came back
    assert refused() == pytest.approx(2, abs=0.1)


def test_a_client_that_was_refused_twice_and_then_accepted_does_not_count_any_more() -> None:
    clock = VirtualClock()
    waits = estimate(clock)

    def refused() -> float:
        return wait(waits, at(4, 2), FIVE)

    assert [refused() for _ in range(3)] == pytest.approx([2, 6, 12], abs=0.1)
    clock.advance(2.5)
    assert refused() == pytest.approx(12, abs=0.1), "the first client comes back, and two others wait"
    waits.accepted("")  # its client tried earlier than named
    clock.advance(4)
    assert refused() == pytest.approx(6, abs=0.1), "the second client comes back, and one other waits"
    assert refused() == pytest.approx(12, abs=0.1), "two clients wait before a new one"


def test_a_request_without_a_token_is_in_prefill_if_more_requests_ran_at_once_lately() -> None:
    found = []
    for before in (at(4, 4), at(4)):
        clock = VirtualClock()
        waits = estimate(clock)
        wait(waits, before, FIVE, is_promise=False)
        clock.advance(1)
        found.append(wait(waits, at(4, 0, 0), FIVE, needed=2))
    assert found == pytest.approx([10, 12], abs=0.1)


def test_short_answers_that_wait_end_before_long_ones_where_the_engine_runs_them_first() -> None:
    places = [Place(FIVE, 4), Place(FIVE, 0), Place(always(1), 0)]
    named = {}
    for is_shortest_first in (False, True):
        waits = WaitEstimate(VirtualClock(), is_shortest_first=is_shortest_first)
        for _ in range(500):
            waits.record(0.0, 100 * SECONDS_PER_TOKEN, 100)
        named[is_shortest_first] = wait(waits, places, FIVE, needed=2)
    assert named == {False: pytest.approx(12, abs=0.1), True: pytest.approx(4, abs=0.1)}


def test_scopes_count_their_own_clients() -> None:
    waits = estimate(VirtualClock())
    for _ in range(10):
        wait(waits, at(4, 1), FIVE)
    assert wait(waits, at(4, 1), FIVE, scope="alice") == pytest.approx(2, abs=0.1)


def test_a_client_that_never_waits_makes_others_wait_for_a_bounded_time() -> None:
    clock = VirtualClock()
    waits = estimate(clock)
    for _ in range(10_000):
        found = wait(waits, at(4, 2), FIVE)
        clock.advance(0.001)
    # The sixteenth end: 2, 6, 12, 16, ..., 72, 76.
    assert found == pytest.approx(76, abs=0.5)
    assert len(waits._promises[""]) <= 4096


def test_before_the_first_answer_the_time_is_bounded_and_grows_with_the_clients_ahead() -> None:
    anyone = LengthPredictor().predict(LengthFeatures("", 0, 0, 1, 8192))
    waits = WaitEstimate(VirtualClock(), is_shortest_first=False)
    named = [wait(waits, [Place(anyone, 0)] * 64, anyone) for _ in range(64)]
    assert named == sorted(named) and named[0] < 5 and named[-1] <= 600


def test_without_places_there_is_nothing_to_wait_for() -> None:
    assert wait(estimate(VirtualClock()), [], FIVE) == 0


@pytest.mark.parametrize(
    ("seconds", "header"), [(0, "1"), (0.2, "1"), (1.2, "2"), (59.9, "60"), (600, "600"), (1e9, "600")]
)
def test_retry_after_is_between_one_second_and_ten_minutes(seconds: float, header: str) -> None:
    assert retry_after(seconds) == header
