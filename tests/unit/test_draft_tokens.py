"""Which draft tokens are proposed for a sequence, and how many of them a step checks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.clock import VirtualClock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import InferenceRequest, RequestId, SamplingParams
from weft.scheduling import draft_tokens
from weft.scheduling.draft_tokens import INITIAL_ACCEPTANCE, LEARNING_RATE, SEARCH_WINDOW, DraftProposer
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

# Shifted copies of the same bytes: a search byte by byte finds many false matches.
SHIFTED = (0, 1, 1 << 8, 1 << 16, 1 << 24)
texts = st.one_of(
    st.lists(st.sampled_from((3, 4)), max_size=60),
    st.lists(st.sampled_from((3, 4, 5, 6)), max_size=60),
    st.lists(st.sampled_from(SHIFTED), max_size=60),
)


def find_slowly(tokens: list[int]) -> int:
    """The index after the last earlier occurrence of the longest suffix of `tokens`, or -1."""
    for length in (8, 4, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return -1


def continued(tokens: list[int], source: int, count: int) -> list[int]:
    """Copies `count` tokens from `source` on. A copy that reaches the end continues with the copied tokens."""
    text = list(tokens)
    for index in range(count if source >= 0 else 0):
        text.append(text[source + index])
    return text[len(tokens) :]


@given(texts, st.integers(1, 20))
def test_the_tokens_after_the_longest_and_last_match_are_proposed_and_loops_repeat(
    tokens: list[int], count: int
) -> None:
    proposer, source = DraftProposer(tokens), find_slowly(tokens)
    assert proposer.has_match is (source >= 0)
    assert list(proposer.propose(count)) == continued(tokens, source, count)


@settings(max_examples=60)
@given(texts, st.lists(st.lists(st.sampled_from((3, 4, 1, 256)), max_size=6), max_size=12))
def test_a_match_is_kept_while_it_is_right_and_searched_again_once_it_is_wrong(
    tokens: list[int], pieces: list[list[int]]
) -> None:
    """The same for one new token or several at once."""
    proposer, source, rate = DraftProposer(tokens), find_slowly(tokens), INITIAL_ACCEPTANCE
    for piece in pieces:
        for token in piece:
            if source >= 0:
                is_right = tokens[source] == token
                rate += LEARNING_RATE * (is_right - rate)
                source = source + 1 if is_right else -1
            tokens.append(token)
        source = source if source >= 0 else find_slowly(tokens)
        proposer.update()
        assert proposer.acceptance_rate == pytest.approx(rate)
        assert list(proposer.propose(9)) == continued(tokens, source, 9)


def test_a_match_that_is_right_is_kept_although_a_later_one_exists() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 9, 9, 1, 2]
    proposer = DraftProposer(tokens)
    assert proposer.propose(2) == (9, 9)
    tokens += [3]  # wrong: it searches again, and finds the first occurrence
    proposer.update()
    assert proposer.propose(3) == (4, 5, 1)
    tokens += [4, 5, 1, 2]  # "1 2" also occurs later, but this match is right
    proposer.update()
    assert proposer.propose(3) == (9, 9, 1)


def test_bytes_that_match_across_token_borders_are_no_match() -> None:
    shifted, pair = [5, 1, 1, 7], [256, 256]
    assert b"".join(t.to_bytes(4, "little") for t in pair) in b"".join(
        t.to_bytes(4, "little") for t in shifted
    ), "the bytes must match"
    assert not DraftProposer([*shifted, *pair]).has_match
    assert DraftProposer([*pair, 9, *shifted, *pair]).propose(1) == (9,)
    # The zero bytes of the next token give three false matches before the true one.
    assert DraftProposer([7, 0, 0, 1 << 24, 9, 0, 0]).propose(1) == (1 << 24,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3], [1, 2, 1]])
def test_without_an_earlier_pair_nothing_is_proposed(tokens: list[int]) -> None:
    proposer = DraftProposer(tokens)
    assert not proposer.has_match and proposer.propose(5) == ()


@pytest.mark.parametrize("length", [SEARCH_WINDOW, SEARCH_WINDOW + 1])
def test_only_the_search_window_is_searched(length: int) -> None:
    tokens = [1, 2, *range(10, 10 + length - 4), 1, 2]
    assert DraftProposer(tokens).propose(1) == ((10,) if length == SEARCH_WINDOW else ())


def test_the_acceptance_rate_rises_with_each_right_proposal_and_falls_with_each_wrong_one() -> None:
    tokens = [1, 2] * 4
    proposer, rates = DraftProposer(tokens), [INITIAL_ACCEPTANCE]
    for _ in range(30):
        tokens += [1, 2]
        proposer.update()
        assert rates[-1] < proposer.acceptance_rate < 1.0
        rates.append(proposer.acceptance_rate)
    assert proposer.acceptance_rate > 0.95
    tokens.append(7)
    proposer.update()
    assert proposer.acceptance_rate == pytest.approx(0.9 * rates[-1]) and not proposer.has_match
    before = proposer.acceptance_rate
    tokens += [8, 9]
    proposer.update()
    assert proposer.acceptance_rate == before, "nothing was proposed, so nothing is learned"


# ---------------------------------------------------------------------- how many draft tokens a step checks


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
    """Sequences that have their first token and are about to repeat their prompt."""
    sequences = []
    for number in range(count):
        loop = (10 * number, 10 * number + 1, 10 * number + 2)
        params_of = SamplingParams(max_tokens=100, **params)
        request = InferenceRequest((*loop, *loop), params_of, request_id=RequestId(str(number)))
        sequences.append(Sequence(request, seed=1))
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
    ("num_running", "rate", "num_drafts"),
    [
        # A draft token is added while rate ** position exceeds the tokens per row of the step so far:
        # (n + expected accepted draft tokens) / (7 + n + draft tokens).
        (1, 0.5, 2),
        (1, 0.12, 0),
        (
            1,
            0.7,
            4,
        ),  # the fifth has 0.17, more than 1 / 8, but the step already yields 2.8 tokens for 12 rows
        (1, 0.99, 11),
        (8, 0.5, 0),
        (8, 0.8, 2),
        (32, 0.8, 0),
        (32, 0.95, 3),
    ],
)
def test_one_sequence_alone_gets_many_draft_tokens_and_among_many_only_likely_ones(
    num_running: int, rate: float, num_drafts: int
) -> None:
    scheduler = scheduler_of()
    sequences = begin(scheduler, num_running)
    for sequence in sequences:
        assert sequence.draft_proposer is not None
        sequence.draft_proposer.own_rate = 0.0
    chosen = sequences[-1]
    assert chosen.draft_proposer is not None
    chosen.draft_proposer.own_rate = rate
    plan = planned(scheduler)
    first = 10 * (num_running - 1)
    loop = (first + 1, first + 2, first) * 4
    assert plan.drafts == ((loop[:num_drafts],) if num_drafts else ())


def test_max_draft_tokens_is_a_limit() -> None:
    scheduler = scheduler_of(max_draft_tokens=4)
    (sequence,) = begin(scheduler, 1)
    assert sequence.draft_proposer is not None
    sequence.draft_proposer.own_rate = 0.99
    assert [len(drafts) for drafts in planned(scheduler).drafts] == [4]


@pytest.mark.parametrize(
    ("num_running", "rate", "pays_off"),
    [
        (1, 0.5, True),  # (0.5 + 0.25) * 8 rows are saved for 2 rows
        (1, 0.36, False),  # 0.36 * 8 - 1 is less than the gap
        (8, 0.8, False),  # (0.8 + 0.64) * 15 / 8 - 2 is less too; with all eight sequences it would be more
        (32, 0.5, False),
    ],
)
def test_a_step_waits_for_the_previous_one_only_if_draft_tokens_save_more_than_the_gap_costs(
    num_running: int, rate: float, pays_off: bool
) -> None:
    scheduler = scheduler_of()
    sequences = begin(scheduler, num_running)
    for sequence in sequences:
        assert sequence.draft_proposer is not None
        sequence.draft_proposer.own_rate = rate if sequence is sequences[0] else 0.0
    speculation = scheduler._planner.speculation
    speculation.costs.learn(num_running, 0.001 * (7 + num_running))  # a row takes a millisecond
    for _ in range(200):
        speculation.costs.learn_gap(2 / 3 * 0.001)
    assert speculation.costs.gap_rows == pytest.approx(2.0, rel=1e-3)
    assert speculation.should_wait_for_tokens(scheduler.running) is pays_off
    if num_running == 8:
        for sequence in sequences:
            assert sequence.draft_proposer is not None
            sequence.draft_proposer.own_rate = rate
        assert speculation.should_wait_for_tokens(scheduler.running), "5.6 rows saved, 2 lost"
    for sequence in sequences:
        sequence.draft_proposer = None
    assert not speculation.should_wait_for_tokens(scheduler.running)


def test_the_scheduler_forbids_planning_ahead_only_while_draft_tokens_pay_off() -> None:
    scheduler = scheduler_of()
    (sequence,) = begin(scheduler, 1)
    assert not scheduler.may_plan_ahead
    answered = 0
    while not scheduler.may_plan_ahead:
        plan = planned(scheduler)
        answered += 1
        scheduler.apply(plan, StepResult(tokens=[500 + answered] * plan.num_samples))
        assert answered < 20
    assert not planned(scheduler).drafts, "no token pair has occurred before"
    assert scheduler.may_plan_ahead and sequence.finish_reason is None


@pytest.mark.parametrize(
    ("fixed_cost_rows", "options"),
    [(0.0, {}), (7.0, {"max_draft_tokens": 0})],
    ids=["backend without draft tokens", "turned off"],
)
def test_the_backend_or_the_settings_can_forbid_draft_tokens(
    fixed_cost_rows: float, options: dict[str, int]
) -> None:
    scheduler = scheduler_of(fixed_cost_rows, **options)
    (sequence,) = begin(scheduler, 1)
    assert sequence.draft_proposer is None and scheduler.may_plan_ahead
    assert planned(scheduler).drafts == ()


def test_a_match_that_is_right_needs_no_new_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [1, 2, 3, 1, 2]
    proposer = DraftProposer(tokens)
    monkeypatch.setattr(draft_tokens.DraftProposer, "_find", lambda self: pytest.fail("searched"))
    for token in (3, 1, 2, 3, 1, 2):
        tokens.append(token)
        proposer.update()
    assert proposer.propose(2) == (3, 1)
