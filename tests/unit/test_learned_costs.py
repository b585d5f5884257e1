"""What a scheduler learned about the costs of steps is kept, restored with little weight, and learned again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.config import PriorityPolicy, SchedulerConfig
from weft.learned_costs import LearnedCosts
from weft.plan import BackendInfo, StepResult
from weft.request import InferenceRequest, SamplingParams
from weft.scheduling.decode_costs import MAX_DEVIATION, DecodeCosts
from weft.scheduling.policy import StepCostModel
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

INFO = BackendInfo(100, 8192, 2048, 16, 0, 1, fixed_cost_rows=4.0)


def trained_model(seconds_per_token: float, steps: int = 60) -> StepCostModel:
    model = StepCostModel()
    train(model, seconds_per_token, steps)
    return model


def train(model: StepCostModel, seconds_per_token: float, steps: int) -> None:
    for number in range(steps):
        tokens = 16 * (number % 8 + 1)
        model.learn(tokens, tokens, 0, 0, 0.002 + seconds_per_token * tokens)


def learned(seconds_per_token: float) -> LearnedCosts:
    decodes = DecodeCosts(4.0)
    for rows in (1, 2, 4, 8) * 20:
        decodes.learn(rows, 0.001 * (8 + rows))
    decodes.learn_gap(0.0001)
    return LearnedCosts.of(**trained_model(seconds_per_token).sums, **decodes.means)


def scheduler(costs: LearnedCosts | None = None) -> ContinuousBatchScheduler:
    made = ContinuousBatchScheduler(SchedulerConfig(policy=PriorityPolicy.ADAPTIVE), INFO, VirtualClock())
    if costs is not None:
        made.restore_costs(costs)
    return made


def first_chunk(costs: LearnedCosts | None) -> int:
    """The tokens of a long prompt that are planned beside the first decode."""
    made = scheduler(costs)
    for number, length in enumerate((4, 4000)):
        params = SamplingParams(max_tokens=50)
        made.add(Sequence(InferenceRequest((1,) * length, params, request_id=str(number)), 0))  # type: ignore[arg-type]
        plan = made.schedule()
        assert plan is not None
        if not number:
            made.apply(plan, StepResult(tokens=[5]), 0.001)
    return plan.counts[-1]


def test_the_first_prompts_after_a_restore_are_planned_with_what_was_learned() -> None:
    slow, fast, unknown = first_chunk(learned(0.001)), first_chunk(learned(0.00001)), first_chunk(None)
    target = SchedulerConfig().target_inter_token_latency
    assert slow == pytest.approx(target / 0.001, rel=0.5) and slow < fast
    assert slow != unknown


def test_learned_costs_survive_a_restore_and_a_second_one_changes_nothing() -> None:
    costs = learned(0.001)
    once = scheduler(costs).learned_costs()
    assert once != costs  # it has less weight
    assert scheduler(once).learned_costs() == once
    again = scheduler(costs)
    expected = trained_model(0.001)
    assert again.cost_model.is_ready
    assert again.cost_model.predict(100, 0, 0) == pytest.approx(expected.predict(100, 0, 0), rel=0.01)
    assert again.speculation.costs.fixed_rows == costs.fixed_rows
    assert again.speculation.costs.gap_rows > 0


def test_a_machine_that_became_slower_is_learned_again_within_dozens_of_steps() -> None:
    model = StepCostModel()
    model.restore(learned(0.0001))
    train(model, 0.0004, 40)
    assert model.predict(100, 0, 0) == pytest.approx(0.042, rel=0.1)


def test_the_default_forgets_everything() -> None:
    forgetful = scheduler(learned(0.001))
    forgetful.restore_costs(LearnedCosts())
    assert forgetful.learned_costs() == scheduler().learned_costs()
    assert not forgetful.cost_model.is_ready


def test_a_scheduler_whose_numbers_make_no_sense_keeps_nothing() -> None:
    spoilt = scheduler()
    spoilt.cost_model.learn(1, 1, 0, 0, math.inf)
    assert spoilt.learned_costs() == LearnedCosts()


def test_restored_draft_costs_stay_within_their_limits() -> None:
    costs = DecodeCosts(4.0)
    costs.restore(LearnedCosts(fixed_rows=1e9, mean_rows=2, mean_seconds=0.01))
    assert costs.fixed_rows == 4.0 * MAX_DEVIATION
    off = DecodeCosts(0.0)  # a backend without draft tokens
    off.restore(learned(0.001))
    assert off.fixed_rows == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": math.nan},
        {"mean_seconds": -1.0},
        {"fixed_rows": math.inf},
        {"products": (0.0, 0.0)},
        {"products": (0.0, 0.0, 0.0, 1e300)},
        {"moments": ((0.0,) * 4,) * 3},
        {"moments": ((0.0,) * 3,) * 4},
    ],
    ids=str,
)
def test_costs_that_no_scheduler_could_learn_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="costs"):
        LearnedCosts(**fields)


def test_accepted_drafts_save_steps_and_rejected_ones_cost_rows() -> None:
    speculation = scheduler().speculation
    assert speculation.seconds_saved(4, 4, 1) == 0  # no step was measured
    for rows in (1, 2, 4, 8) * 40:
        speculation.costs.learn(rows, 0.001 * (4 + rows))
    saved = speculation.seconds_saved
    # Alone, four tokens in one step save four steps of 5 ms, and cost four rows.
    assert saved(4, 4, 1) == pytest.approx(4 * 0.005 - 4 * 0.001, rel=0.05)
    assert saved(4, 0, 1) == pytest.approx(-0.004, rel=0.05)
    assert saved(4, 4, 4) == pytest.approx(4 * 0.002 - 4 * 0.001, rel=0.05)
