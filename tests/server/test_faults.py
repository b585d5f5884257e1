"""A short fault run: every fault once on the noop backend, and damaged weights with the real model."""

from __future__ import annotations

import pytest
from fault_plan import OF_WEIGHTS, Fault, Window, draw_plan
from fault_run import run_faults, summary


def test_after_every_fault_all_requests_ended_health_was_correct_and_nothing_is_held() -> None:
    outcome = run_faults(seed=1, backend="noop")
    assert set(outcome.plan.faults) == set(Fault) - set(OF_WEIGHTS)
    assert outcome.violations == [], outcome.log[-4000:]
    assert outcome.requests > 50 and set(outcome.counts) == {"Responses", "Messages", "Ollama", "Batches"}


def test_damaged_packed_weights_are_rebuilt_and_answers_stay_correct() -> None:
    outcome = run_faults(seed=1, backend="cpu", count=len(OF_WEIGHTS))
    assert set(outcome.plan.faults) == set(OF_WEIGHTS)
    assert outcome.violations == [], outcome.log[-4000:]


def test_the_same_seed_is_the_same_run() -> None:
    one, other = draw_plan(3, "noop"), draw_plan(3, "noop")
    assert one.faults == other.faults and one.source.random() == other.source.random()
    assert one.faults != draw_plan(4, "noop").faults


def test_the_summary_counts_runs_and_violations_apart() -> None:
    assert summary(3, 2, 5) == "1 runs passed, 2 failed, 5 violations"
    assert summary(3, 0, 0) == "3 runs passed, no violation"


@pytest.mark.parametrize(
    ("code", "began", "is_explained"),
    [("engine_died", 5.0, True), ("engine_died", 11.0, False), ("internal_error", 5.0, False)],
)
def test_an_error_is_explained_only_by_a_concurrent_fault_that_can_cause_it(
    code: str, began: float, is_explained: bool
) -> None:
    window = Window(Fault.KILLED_ENGINE, 4.0, 10.0)
    assert (window.covers(began, began + 0.5) and window.explains(code)) == is_explained
