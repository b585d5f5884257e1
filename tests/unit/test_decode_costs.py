"""The fixed cost of a decode step is learned on any processor, and decides the number of draft tokens."""

from __future__ import annotations

import random

import pytest

from weft.clock import VirtualClock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo, StepResult
from weft.request import InferenceRequest, SamplingParams
from weft.scheduling.decode_costs import MAX_DEVIATION, DecodeCosts
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

STATED = 4.0
# Milliseconds of a step of 1 to 12 rows of the default model on a core with AVX2: tiles of 4 rows.
STAIRCASE = (5.0, 6.0, 8.0, 9.7, 13.0, 14.5, 16.5, 17.6, 20.4, 23.2, 24.9, 26.8)


def trained(fixed_rows: float, steps: int, noise: float = 0.0, row: float = 0.002) -> DecodeCosts:
    """After `steps` steps of 1 to 12 rows, each longer than predicted by a random share of up to `noise`."""
    costs = DecodeCosts(STATED)
    train(costs, fixed_rows, steps, noise, row)
    return costs


def train(costs: DecodeCosts, fixed_rows: float, steps: int, noise: float, row: float) -> None:
    rng = random.Random(5)
    for _ in range(steps):
        rows = rng.choice((1, 1, 2, 3, 4, 6, 12))
        costs.learn(rows, row * (fixed_rows + rows) * (1.0 + noise * rng.random()))


@pytest.mark.parametrize("row", [0.0002, 0.05])
@pytest.mark.parametrize("fixed_rows", [0.8, 1.5, 4.0, 7.0, 20.0])
def test_the_fixed_cost_in_rows_is_learned_within_some_dozens_of_steps(fixed_rows: float, row: float) -> None:
    assert trained(fixed_rows, 40, row=row).fixed_rows == pytest.approx(fixed_rows, rel=0.3)
    assert trained(fixed_rows, 160, row=row).fixed_rows == pytest.approx(fixed_rows, rel=0.05)


@pytest.mark.parametrize("fixed_rows", [1.5, 7.0])
def test_on_a_noisy_machine_the_estimate_is_still_about_right(fixed_rows: float) -> None:
    for steps in range(60, 400, 20):
        assert 0.4 * fixed_rows < trained(fixed_rows, steps, noise=0.5).fixed_rows < 2.5 * fixed_rows


def test_among_many_streams_noise_hardly_moves_the_estimate() -> None:
    """8 streams with draft tokens: the rows of steps differ by ten, and so a few steps decide little."""
    rng, costs = random.Random(5), DecodeCosts(STATED)
    for number in range(4000):
        rows = 8 + min(24, int(rng.expovariate(0.1)))
        costs.learn(rows, 0.0006 * (5.0 + rows) * (1.0 + 0.5 * rng.random()))
        assert number < 200 or 1.5 < costs.fixed_rows < 10.0


def test_a_staircase_of_costs_is_learned_as_a_line_that_is_close_to_it() -> None:
    rng, costs = random.Random(5), DecodeCosts(STATED)
    for _ in range(100):
        rows = rng.randrange(1, 13)
        costs.learn(rows, STAIRCASE[rows - 1])
    assert 0.8 < costs.fixed_rows < 2.0
    row = STAIRCASE[5] / (costs.fixed_rows + 6)
    for rows, seconds in enumerate(STAIRCASE[1:], 2):
        assert row * (costs.fixed_rows + rows) == pytest.approx(seconds, rel=0.15)


def test_equal_steps_do_not_change_the_estimate() -> None:
    costs = DecodeCosts(STATED)
    for number in range(1000):
        costs.learn(8, 0.02 * (1.0 + 0.3 * (number % 3)))
    assert costs.fixed_rows == STATED


def test_growing_contexts_are_not_mistaken_for_rows() -> None:
    """Steps become twice as long, while they have fewer and fewer draft tokens."""
    costs = DecodeCosts(STATED)
    for number in range(400):
        rows = 1 + (number % 7 if number < 200 else 2 * (number % 2))
        costs.learn(rows, 0.001 * (7.0 + rows) + 0.00002 * number)
    assert 7.0 < costs.fixed_rows < 20.0, "15 rows at the end, 7 at the beginning"


def test_after_a_slowdown_or_a_stall_the_estimate_soon_returns() -> None:
    costs = trained(7.0, 160)
    train(costs, 7.0, 60, noise=0.0, row=0.004)
    assert costs.fixed_rows == pytest.approx(7.0, rel=0.25)
    costs.learn(1, 60.0)
    assert costs.fixed_rows < 2 * 7.0
    train(costs, 7.0, 60, noise=0.0, row=0.004)
    assert costs.fixed_rows == pytest.approx(7.0, rel=0.25)


def test_the_estimate_stays_within_a_factor_of_the_stated_value_for_any_clock() -> None:
    rng = random.Random(1)
    for stated in (0.001, STATED, 1e6):
        costs = DecodeCosts(stated)
        for _ in range(500):
            costs.learn(rng.randrange(1, 40), rng.choice((0.0, 1e-9, 0.1, 50.0)))
            costs.learn_gap(rng.choice((-1.0, 0.0, 0.001, 1000.0)))
            assert stated / MAX_DEVIATION <= costs.fixed_rows * 1.000001
            assert costs.fixed_rows <= stated * MAX_DEVIATION * 1.000001
            assert costs.gap_rows <= 1.000001 * (stated * MAX_DEVIATION + 40) / 4


# ---------------------------------------------------------------------- in the scheduler


class Machine:
    """A scheduler with one sequence that repeats itself, on a processor with these costs."""

    def __init__(self, fixed_rows: float, row: float = 0.002, gap: float = 0.0) -> None:
        info = BackendInfo(
            vocabulary_size=100,
            max_context=4096,
            num_blocks=512,
            block_size=16,
            swap_blocks=0,
            bytes_per_block=8,
            fixed_cost_rows=STATED,
        )
        self.clock = VirtualClock()
        self.scheduler = ContinuousBatchScheduler(SchedulerConfig(), info, self.clock)
        self.fixed_rows, self.row, self.gap = fixed_rows, row, gap
        request = InferenceRequest((1, 2, 3, 4, 5) * 2, SamplingParams(max_tokens=2000, ignore_eos=True))
        self.sequence = Sequence(request, seed=1)
        self.scheduler.add(self.sequence)

    def step(self, wrong: bool = False) -> int:
        """Runs one step. Returns the number of its draft tokens."""
        plan = self.scheduler.schedule()
        assert plan is not None
        seconds = self.row * (self.fixed_rows + plan.num_tokens)
        self.clock.advance(seconds)
        length = len(self.sequence.tokens)
        tokens = [9 if wrong else 1 + (length + number) % 5 for number in range(plan.num_samples)]
        self.scheduler.apply(plan, StepResult(tokens=tokens), seconds)
        self.clock.advance(self.gap)
        return sum(map(len, plan.drafts))

    @property
    def costs(self) -> DecodeCosts:
        return self.scheduler._planner.speculation.costs


def test_cheap_rows_give_more_draft_tokens_and_expensive_rows_fewer() -> None:
    counts = {}
    for fixed_rows in (0.7, 30.0):
        machine = Machine(fixed_rows)
        for _ in range(40):
            machine.step()
        assert machine.costs.fixed_rows == pytest.approx(fixed_rows, rel=0.25)
        proposer = machine.sequence.draft_proposer
        assert proposer is not None
        proposer.own_rate = 0.7
        counts[fixed_rows] = machine.step()
    assert counts[0.7] < 3 < counts[30.0], counts


def test_the_gap_between_two_steps_is_learned_in_rows() -> None:
    machine = Machine(fixed_rows=4.0, gap=0.0005)
    for _ in range(150):
        machine.step()
    assert machine.costs.gap_rows == pytest.approx(3 * 0.0005 / 0.002, rel=0.2)
    quick = Machine(fixed_rows=4.0)
    for _ in range(50):
        quick.step()
    assert quick.costs.gap_rows == pytest.approx(0.0, abs=1e-6)


def test_a_step_with_a_prompt_does_not_change_the_estimate() -> None:
    machine = Machine(fixed_rows=0.5)
    assert machine.step() == 0, "the prompt"
    assert machine.costs.fixed_rows == STATED and machine.costs.gap_rows == 0.0


def test_equal_clock_readings_give_equal_draft_tokens() -> None:
    counts = []
    for _ in range(2):
        machine, rng = Machine(fixed_rows=2.0), random.Random(3)
        drafts = []
        for number in range(120):
            machine.row = 0.001 * (1 + rng.random())
            drafts.append(machine.step(wrong=number % 11 == 0))
        counts.append(drafts)
    assert counts[0] == counts[1] and len(set(counts[0])) > 2
