"""Draft tokens that a grammar forces: they come first, and they do not change acceptance rates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_drafts import Script

from weft.config import PreemptionMode
from weft.plan import IterationPlan, StepResult
from weft.request import Grammar, RequestId
from weft.scheduling.draft_tokens import INITIAL_ACCEPTANCE, DraftProposer

FORCED = (20, 21, 22, 23)
GRAMMAR = Grammar("regex", ".*")


def forced(tokens: list[int], following: tuple[int, ...], **options: Any) -> DraftProposer:
    proposer = DraftProposer(tokens, **options)
    proposer.force(following)
    return proposer


def test_forced_tokens_need_no_match() -> None:
    proposer = forced([1, 2, 3], FORCED)
    assert not proposer.has_match and proposer.num_forced == 4
    assert proposer.propose(3) == FORCED[:3] and proposer.propose(9) == FORCED


def test_a_match_that_agrees_goes_on_after_the_forced_tokens() -> None:
    tokens = [1, 2, *FORCED, 30, 31, 1, 2]
    proposer = forced(tokens, FORCED)
    assert proposer.has_match
    assert proposer.propose(6) == (*FORCED, 30, 31) and proposer.propose(2) == FORCED[:2]


def test_a_match_that_disagrees_is_not_used() -> None:
    tokens = [1, 2, 20, 21, 9, 1, 2]
    proposer = forced(tokens, FORCED)
    assert not proposer.has_match
    assert proposer.propose(6) == FORCED


def test_forced_tokens_end_before_a_stop_token() -> None:
    assert forced([1, 2, 3], FORCED).propose(9, {22}) == FORCED[:2]


def test_forced_tokens_are_dropped_as_they_are_sampled_and_do_not_change_the_rate() -> None:
    tokens = [1, 2, 20, 9, 9, 1, 2]
    proposer = forced(tokens, FORCED)
    tokens += [20, 21]
    proposer.update()
    assert proposer.propose(9) == (22, 23)
    assert proposer.own_rate == INITIAL_ACCEPTANCE, "20 was right and 21 wrong, but both were forced"
    tokens += [22, 23]
    proposer.update()
    assert proposer.num_forced == 0 and proposer.propose(9) == ()


def test_a_token_after_the_forced_ones_changes_the_rate() -> None:
    tokens = [1, 2, *FORCED, 30, 1, 2]
    proposer = forced(tokens, FORCED)
    tokens += [*FORCED, 30]
    proposer.update()
    assert INITIAL_ACCEPTANCE < proposer.own_rate < INITIAL_ACCEPTANCE + 0.1, "one token of five changes it"


@pytest.mark.parametrize(("is_right", "counts"), [(True, (5, 1)), (False, (0, 0))])
def test_forced_tokens_count_as_predicted_if_the_prediction_has_them(
    is_right: bool, counts: tuple[int, int]
) -> None:
    prediction = (*FORCED, 30, 31) if is_right else (*FORCED[:2], 9, 9)
    tokens = [1, 2, 3]
    proposer = forced(tokens, FORCED, prediction=prediction)
    drafts = proposer.propose(6)
    assert drafts == (prediction if is_right else FORCED)
    proposer.count_checked(len(drafts), 5 if is_right else 4)
    assert (proposer.num_predicted_accepted, proposer.num_predicted_rejected) == counts


# ---------------------------------------------------------------------- in the scheduler


class ForcingScript(Script):
    """The backend reports the next four tokens of an answer as forced."""

    def result(self, plan: IterationPlan) -> StepResult:
        following: dict[RequestId, tuple[int, ...]] = {}
        all_drafts = ((),) * plan.num_decodes + plan.drafts + ((),) * plan.num_prefills
        for entry, drafts in enumerate(all_drafts):
            text, position = self.texts[plan.request_ids[entry]], plan.starts[entry] + plan.counts[entry]
            if plan.samples[entry]:
                assert drafts == text[position - len(drafts) : position], "all draft tokens are right"
                following[plan.request_ids[entry]] = text[position + 1 : position + 5]
        return dataclasses.replace(super().result(plan), forced=following)


DISTINCT = tuple(range(100, 140))
"""An answer that has no token twice: without forced tokens it has no draft tokens."""


def test_a_sequence_with_forced_tokens_needs_fewer_steps() -> None:
    script = ForcingScript()
    script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
    script.run()
    assert script.reported() == list(DISTINCT)
    assert len(script.plans) == 1 + -(-(len(DISTINCT) - 1) // 5), (
        "a step gives four forced tokens and one more"
    )
    stats = script.scheduler.stats
    assert stats.drafts_accepted == stats.tokens_drafted > 0


def test_a_step_checks_at_most_max_draft_tokens_forced_ones() -> None:
    script = ForcingScript(max_draft_tokens=2)
    script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
    script.run()
    assert script.reported() == list(DISTINCT)
    assert max(len(drafts) for plan in script.plans for drafts in plan.drafts) == 2


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_forced_tokens_are_the_right_ones_after_a_preemption(mode: PreemptionMode) -> None:
    script = ForcingScript(num_blocks=6, preemption=mode, prefix_caching=False)
    for number in range(3):
        script.add(
            (10 * number, 10 * number + 1), tuple(range(100 * number, 100 * number + 60)), grammar=GRAMMAR
        )
    script.run()
    stats = script.scheduler.stats
    assert stats.preemptions_by_swap if mode is PreemptionMode.SWAP else stats.preemptions_by_recompute
    for number in range(3):
        assert script.reported(number) == list(range(100 * number, 100 * number + 60))


def test_forced_tokens_of_a_failed_step_are_not_used() -> None:
    script = ForcingScript()
    script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
    script.step()
    plan = script.plan()
    script.scheduler.fail(
        dataclasses.replace(script.result(plan), error="simulated", forced={RequestId("0"): (9,)})
    )
    script.run()
    assert script.reported() == list(DISTINCT)


@pytest.mark.parametrize(("num_forced", "pays_off"), [(1, False), (2, True)])
def test_a_step_waits_for_forced_tokens_only_if_some_follow_the_one_that_is_being_sampled(
    num_forced: int, pays_off: bool
) -> None:
    script = ForcingScript()
    sequence = script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
    script.step()
    assert sequence.draft_proposer is not None
    sequence.draft_proposer.force(DISTINCT[1 : 1 + num_forced])
    speculation, running = script.scheduler.speculation, script.scheduler.running
    assert speculation.should_wait_for_tokens(running)
    sequence.target += 1  # as if a step in flight sampled the next token
    assert speculation.should_wait_for_tokens(running) is pays_off
    sequence.target -= 1


@pytest.mark.parametrize(("stop", "pays_off"), [(DISTINCT[2], False), (DISTINCT[9], True)])
def test_a_step_does_not_wait_for_forced_tokens_after_a_stop_token(stop: int, pays_off: bool) -> None:
    script = ForcingScript()
    sequence = script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR, stop_token_ids=(stop,))
    script.step()  # the grammar forces DISTINCT[1:5]
    sequence.target += 1  # as if a step in flight sampled the next token
    assert script.scheduler.speculation.should_wait_for_tokens(script.scheduler.running) is pays_off
    sequence.target -= 1


def test_with_draft_tokens_off_forced_tokens_are_ignored() -> None:
    script = ForcingScript(max_draft_tokens=0)
    script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
    script.run()
    assert script.reported() == list(DISTINCT) and not any(plan.drafts for plan in script.plans)


@pytest.mark.parametrize("most", [4, 11])
def test_only_draft_tokens_after_the_forced_ones_are_counted_as_learned(most: int) -> None:
    script = ForcingScript(max_draft_tokens=most)
    for _ in range(2):
        script.add((1, 2, 3), DISTINCT, grammar=GRAMMAR)
        script.run()
    num_learned = sum(max(0, len(drafts) - 4) for plan in script.plans for drafts in plan.drafts)
    stats = script.scheduler.stats
    assert stats.learned_drafts == stats.learned_drafts_accepted == num_learned
    assert (num_learned > 0) is (most > 4)
