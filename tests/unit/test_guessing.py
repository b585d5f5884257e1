"""What a sequence is guessed to go on with, and how many guesses are worth their rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.clock import VirtualClock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import Grammar, InferenceRequest, RequestId, SamplingParams
from weft.scheduling import draft_tokens as guessing
from weft.scheduling.draft_tokens import INITIAL_ACCEPTANCE, LEARNING_RATE, SEARCH_WINDOW, DraftProposer
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

# Their bytes are the same but for the place: what is searched byte by byte finds many that are none.
SHIFTED = (0, 1, 1 << 8, 1 << 16, 1 << 24)
texts = st.one_of(
    st.lists(st.sampled_from((3, 4)), max_size=60),
    st.lists(st.sampled_from((3, 4, 5, 6)), max_size=60),
    st.lists(st.sampled_from(SHIFTED), max_size=60),
)


def found_plainly(tokens: list[int]) -> int:
    """The index behind the last place where the longest end of `tokens` stood before; -1: nowhere."""
    for length in (8, 4, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return -1


def continued(tokens: list[int], source: int, count: int) -> list[int]:
    """What follows if every token is the one at `source`, which goes on with what it has just given."""
    text = list(tokens)
    for index in range(count if source >= 0 else 0):
        text.append(text[source + index])
    return text[len(tokens) :]


@given(texts, st.integers(1, 20))
def test_what_followed_the_longest_match_the_last_time_is_guessed_and_a_loop_goes_on(
    tokens: list[int], count: int
) -> None:
    guesser, source = DraftProposer(tokens), found_plainly(tokens)
    assert guesser.has_match is (source >= 0)
    assert list(guesser.guesses(count)) == continued(tokens, source, count)


@settings(max_examples=60)
@given(texts, st.lists(st.lists(st.sampled_from((3, 4, 1, 256)), max_size=6), max_size=12))
def test_a_source_that_is_right_is_followed_and_one_that_is_wrong_is_left(
    tokens: list[int], pieces: list[list[int]]
) -> None:
    """Told token by token or several at once, it is the same as looking for a source only where there is none."""
    guesser, source, chance = DraftProposer(tokens), found_plainly(tokens), INITIAL_ACCEPTANCE
    for piece in pieces:
        for token in piece:
            if source >= 0:
                is_right = tokens[source] == token
                chance += LEARNING_RATE * (is_right - chance)
                source = source + 1 if is_right else -1
            tokens.append(token)
        source = source if source >= 0 else found_plainly(tokens)
        guesser.learn()
        assert guesser.chance == pytest.approx(chance)
        assert list(guesser.guesses(9)) == continued(tokens, source, 9)


def test_a_source_is_followed_past_a_later_place_that_matches_as_well() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 9, 9, 1, 2]
    guesser = DraftProposer(tokens)
    assert guesser.guesses(2) == (9, 9)
    tokens += [3]  # wrong: it looks anew, and finds the first place
    guesser.learn()
    assert guesser.guesses(3) == (4, 5, 1)
    tokens += [4, 5, 1, 2]  # "1 2" stood later too, but this source is right
    guesser.learn()
    assert guesser.guesses(3) == (9, 9, 1)


def test_bytes_that_match_across_the_borders_of_tokens_are_no_match() -> None:
    shifted, pair = [5, 1, 1, 7], [256, 256]
    assert b"".join(t.to_bytes(4, "little") for t in pair) in b"".join(
        t.to_bytes(4, "little") for t in shifted
    ), "the case is none"
    assert not DraftProposer([*shifted, *pair]).has_match
    assert DraftProposer([*pair, 9, *shifted, *pair]).guesses(1) == (9,)
    # The zeros of the token behind the pair make three places that match, and the fourth is the right one.
    assert DraftProposer([7, 0, 0, 1 << 24, 9, 0, 0]).guesses(1) == (1 << 24,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3], [1, 2, 1]])
def test_where_no_pair_stood_before_there_is_no_guess(tokens: list[int]) -> None:
    guesser = DraftProposer(tokens)
    assert not guesser.has_match and guesser.guesses(5) == ()


@pytest.mark.parametrize("length", [SEARCH_WINDOW, SEARCH_WINDOW + 1])
def test_no_more_than_the_last_tokens_are_searched(length: int) -> None:
    tokens = [1, 2, *range(10, 10 + length - 4), 1, 2]
    assert DraftProposer(tokens).guesses(1) == ((10,) if length == SEARCH_WINDOW else ())


def test_the_chance_rises_with_every_guess_that_was_right_and_falls_with_every_wrong_one() -> None:
    tokens = [1, 2] * 4
    guesser, chances = DraftProposer(tokens), [INITIAL_ACCEPTANCE]
    for _ in range(30):
        tokens += [1, 2]
        guesser.learn()
        assert chances[-1] < guesser.chance < 1.0
        chances.append(guesser.chance)
    assert guesser.chance > 0.95
    tokens.append(7)
    guesser.learn()
    assert guesser.chance == pytest.approx(0.9 * chances[-1]) and not guesser.has_match
    before = guesser.chance
    tokens += [8, 9]
    guesser.learn()
    assert guesser.chance == before, "nothing was guessed: nothing is learned of guessing"


# ---------------------------------------------------------------------- which guesses a step checks


def scheduler_of(fixed_cost_rows: float = 7.0, **options: Any) -> ContinuousBatchScheduler:
    info = BackendInfo(
        vocabulary_size=1000,
        max_context=512,
        num_blocks=512,
        block_size=16,
        swap_blocks=0,
        bytes_per_block=8,
        fixed_cost_rows=fixed_cost_rows,
    )
    config = SchedulerConfig(**{"max_running": 64, **options})
    return ContinuousBatchScheduler(config, info, VirtualClock())


def begin(scheduler: ContinuousBatchScheduler, count: int, **params: Any) -> list[Sequence]:
    """Sequences with their first token, each about to say what it said before."""
    sequences = []
    for number in range(count):
        loop = (10 * number, 10 * number + 1, 10 * number + 2)
        request = InferenceRequest((*loop, *loop), SamplingParams(max_tokens=100, **params))
        sequences.append(Sequence(request, RequestId(number), seed=1))
    scheduler.add(*sequences)
    plan = scheduler.schedule()
    assert plan is not None and len(plan.rows) == count and not plan.drafts
    scheduler.apply(plan, StepResult(tokens=[10 * number for number in range(count)]))
    return sequences


def planned(scheduler: ContinuousBatchScheduler) -> IterationPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("num_running", "chance", "num_drafts"),
    [
        # Chances of the guess itself, and each that it and all before it are right, against what is expected of the step
        # without it: (n + drafts expected to be right) / (7 + n + drafts).
        (1, 0.5, 2),
        (1, 0.12, 0),
        (1, 0.7, 4),  # the fifth has 0.17, more than 1 / 8, but the step already gives 2.8 tokens for 12 rows
        (1, 0.99, 11),
        (8, 0.5, 0),
        (8, 0.8, 2),
        (32, 0.8, 0),
        (32, 0.95, 3),
    ],
)
def test_one_sequence_alone_guesses_boldly_and_among_many_only_who_is_sure(
    num_running: int, chance: float, num_drafts: int
) -> None:
    scheduler = scheduler_of()
    sequences = begin(scheduler, num_running)
    for sequence in sequences:
        assert sequence.guesser is not None
        sequence.guesser.chance = 0.0
    chosen = sequences[-1]
    assert chosen.guesser is not None
    chosen.guesser.chance = chance
    plan = planned(scheduler)
    first = 10 * (num_running - 1)
    loop = (first + 1, first + 2, first) * 4
    assert plan.drafts == ((loop[:num_drafts],) if num_drafts else ())


def test_no_more_drafts_than_stated() -> None:
    scheduler = scheduler_of(max_draft_tokens=4)
    (sequence,) = begin(scheduler, 1)
    assert sequence.guesser is not None
    sequence.guesser.chance = 0.99
    assert [len(drafts) for drafts in planned(scheduler).drafts] == [4]


@pytest.mark.parametrize(
    ("num_running", "chance", "is_worth"),
    [
        (1, 0.5, True),  # (0.5 + 0.25) * 8 rows are saved for 2
        (1, 0.36, False),  # 0.36 * 8 - 1 is less than the gap
        (8, 0.8, False),  # (0.8 + 0.64) * 15 / 8 - 2 is less too: of all eight it would be worth it
        (32, 0.5, False),
    ],
)
def test_a_step_waits_for_the_one_before_it_only_where_guesses_save_more_than_that_costs(
    num_running: int, chance: float, is_worth: bool
) -> None:
    scheduler = scheduler_of()
    sequences = begin(scheduler, num_running)
    for sequence in sequences:
        assert sequence.guesser is not None
        sequence.guesser.chance = chance if sequence is sequences[0] else 0.0
    speculation = scheduler._planner.speculation
    speculation.costs.learn(num_running, 0.001 * (7 + num_running))  # a row takes a millisecond
    for _ in range(200):
        speculation.costs.learn_gap(2 / 3 * 0.001)
    assert speculation.costs.gap_rows == pytest.approx(2.0, rel=1e-3)
    assert speculation.should_wait_for_tokens(scheduler.running) is is_worth
    if num_running == 8:
        for sequence in sequences:
            assert sequence.guesser is not None
            sequence.guesser.chance = chance
        assert speculation.should_wait_for_tokens(scheduler.running), "5.6 rows saved, 2 lost"
    for sequence in sequences:
        sequence.guesser = None
    assert not speculation.should_wait_for_tokens(scheduler.running)


def test_the_scheduler_asks_not_to_plan_ahead_where_guesses_are_worth_it_and_allows_it_again_after() -> None:
    scheduler = scheduler_of()
    (sequence,) = begin(scheduler, 1)
    assert not scheduler.may_plan_ahead
    answered = 0
    while not scheduler.may_plan_ahead:
        plan = planned(scheduler)
        answered += 1
        scheduler.apply(plan, StepResult(tokens=[500 + answered] * plan.num_samples))
        assert answered < 20
    assert not planned(scheduler).drafts, "nothing it says has stood there before"
    assert scheduler.may_plan_ahead and sequence.finish_reason is None


@pytest.mark.parametrize(
    ("fixed_cost_rows", "options", "params"),
    [
        (0.0, {}, {}),
        (7.0, {"max_draft_tokens": 0}, {}),
        (7.0, {}, {"grammar": Grammar("regex", "[a-z]*")}),
    ],
    ids=["backend checks none", "turned off", "grammar"],
)
def test_nothing_is_guessed_where_the_backend_the_settings_or_a_grammar_forbid_it(
    fixed_cost_rows: float, options: dict[str, int], params: dict[str, Any]
) -> None:
    scheduler = scheduler_of(fixed_cost_rows, **options)
    (sequence,) = begin(scheduler, 1, **params)
    assert sequence.guesser is None and scheduler.may_plan_ahead
    assert planned(scheduler).drafts == ()


def test_learning_costs_no_search_while_the_source_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [1, 2, 3, 1, 2]
    guesser = DraftProposer(tokens)
    monkeypatch.setattr(guessing.DraftProposer, "_find", lambda self: pytest.fail("searched"))
    for token in (3, 1, 2, 3, 1, 2):
        tokens.append(token)
        guesser.learn()
    assert guesser.guesses(2) == (3, 1)
