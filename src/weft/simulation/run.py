"""Runs one scenario on the real engine, with the noop backend and a virtual clock, and checks every step."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from weft.backends.noop import NoopBackend, SimulatedFault
from weft.clock import VirtualClock
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, QueueFullError
from weft.plan import IterationPlan, StepResult
from weft.request import RequestId, RequestState, TokenOutput, numbered_ids
from weft.scheduling.sequence import Sequence
from weft.simulation.idle_invariants import IdleChecker
from weft.simulation.invariants import OutputChecker, PlanChecker, check_empty, check_result
from weft.simulation.require import require
from weft.simulation.scenario import Arrival, DrawnFaults, Scenario

MAX_ITERATIONS = 5000
"""Far more than any scenario needs: a run that reaches it makes no progress."""


@dataclass(slots=True)
class Outcome:
    """Counts of what a run covered. A test checks that the scenarios cover everything."""

    steps: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    swaps_failed: int = 0
    steps_failed: int = 0
    tokens_cached: int = 0
    tokens_drafted: int = 0
    drafts_accepted: int = 0
    drafts_forced: int = 0
    predictions_accepted: int = 0
    predictions_rejected: int = 0
    migrations: int = 0
    migrations_shared: int = 0
    plans_beside_paused: int = 0
    plans_with_idle_work_added: int = 0
    plans_compared: int = 0
    passed_by_shorter: int = 0

    def add(self, other: Outcome) -> None:
        for name in Outcome.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class _CheckedBackend(NoopBackend):
    """The noop backend, with a check of every plan. Any exception but a simulated fault is kept in `violation` and ends
    the run, even if the engine recovers from it."""

    plan_checker: PlanChecker
    violation: Exception | None = None

    def submit(self, plan: IterationPlan) -> Any:
        try:
            self.plan_checker.check(plan)
            return super().submit(plan)
        except SimulatedFault:
            self.plan_checker.reset_rotation()
            raise
        except Exception as error:
            self.violation = self.violation or error
            raise

    def _finish(self, step: Any) -> StepResult:
        try:
            result = super()._finish(step)
        except SimulatedFault:
            self.plan_checker.reset_rotation()
            raise
        except Exception as error:
            self.violation = self.violation or error
            raise
        if result.failed:
            self.plan_checker.reset_rotation()
        return result


class Simulation:
    """One run. Owns the clock, the engine, and the outputs of every request."""

    def __init__(self, scenario: Scenario, log_path: str | None = None) -> None:
        self.scenario = scenario
        self._rng = random.Random(scenario.seed ^ 0x5EED)
        self.faults = DrawnFaults(scenario, self._rng)
        self.clock = VirtualClock()
        self.backend = _CheckedBackend(
            vocabulary_size=scenario.vocabulary_size,
            max_context=scenario.max_context,
            eos_token_ids=scenario.eos_token_ids,
            random_source=self._rng,
            faults=self.faults if any(scenario.fault_rates) else None,
            recompute_seconds_per_token=scenario.recompute_seconds_per_token,
            swap_seconds_per_block=scenario.swap_seconds_per_block,
            eager_blocks=scenario.eager_blocks,
            grammars_may_overlap=scenario.grammars_may_overlap,
            fixed_cost_rows=scenario.fixed_cost_rows,
            extra_rows_are_cheap=scenario.extra_rows_are_cheap,
        )
        config = scenario.engine
        if log_path is not None:
            config = dataclasses.replace(config, log_path=log_path)
        self.engine = ServingEngine(
            self.backend,
            config,
            clock=self.clock,
            seed=scenario.seed,
            new_id=numbered_ids(),
            max_failed_steps=None,  # many random faults in a row do not mean that the backend is broken
        )
        self.backend.plan_checker = PlanChecker(self.engine.scheduler)
        self._idle_checker = IdleChecker(self.engine.scheduler)
        self.engine.scheduler.schedule = self._idle_checker.schedule  # type: ignore[method-assign]
        self.output_checkers: dict[RequestId, OutputChecker] = {}
        self.sequences: dict[RequestId, Sequence] = {}
        self._callback_failed: set[RequestId] = set()
        self._cancelled: set[RequestId] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        arrivals = list(reversed(self.scenario.arrivals))
        cancels: list[tuple[float, RequestId]] = []
        before = self.clock()
        for _ in range(MAX_ITERATIONS):
            now = self.clock()
            while arrivals and arrivals[-1].at <= now:
                self._submit(arrivals.pop(), cancels)
            for entry in [c for c in cancels if c[0] <= now]:
                cancels.remove(entry)
                if self.engine.cancel(entry[1]):
                    self._cancelled.add(entry[1])
            worked = self.engine.has_work
            self.engine.run_iteration()
            if self.backend.violation is not None:
                raise self.backend.violation
            self.engine.scheduler.check_integrity()
            self._check_deadlines(before)
            before = now
            self.clock.advance(self._rng.random() * self.scenario.max_step_seconds)
            if not worked:
                if arrivals:
                    self.clock.advance_to(arrivals[-1].at)
                elif not self.engine.scheduler.has_work:
                    break
        else:
            require(False, f"the run has not ended after {MAX_ITERATIONS} iterations")
        self._check_end()
        return self.outcome

    def _submit(self, arrival: Arrival, cancels: list[tuple[float, RequestId]]) -> None:
        outputs_seen = 0
        checker: OutputChecker | None = None

        def take(output: TokenOutput) -> None:
            nonlocal outputs_seen
            assert checker is not None
            checker.take(output)
            outputs_seen += 1
            if arrival.callback_raises_at == outputs_seen - 1:
                self._callback_failed.add(output.request_id)
                raise RuntimeError("simulated fault in a callback")

        try:
            request_id = self.engine.submit_with_callback(arrival.request, take)
        except (QueueFullError, InvalidRequestError):
            self.outcome.refused += 1
            return
        checker = self.output_checkers[request_id] = OutputChecker(arrival.request, request_id)
        self.sequences[request_id] = self.engine.scheduler.sequences[request_id]
        if arrival.cancel_at is not None:
            cancels.append((arrival.cancel_at, request_id))

    def _check_deadlines(self, moment: float) -> None:
        """Requests whose deadline had passed at `moment`, the time of the previous iteration, must have ended."""
        for sequence in self.engine.scheduler.sequences.values():
            overdue = sequence.deadline_at is not None and sequence.deadline_at <= moment
            require(not overdue, f"request {sequence.request_id} runs after its deadline")

    def _check_end(self) -> None:
        scheduler = self.engine.scheduler
        check_empty(scheduler)
        outcome = self.outcome
        for request_id, checker in self.output_checkers.items():
            result = self.engine.get_result(request_id)
            if result is None:
                require(False, f"request {request_id} was lost")
                continue
            sequence = self.sequences[request_id]
            check_result(checker, result, sequence, scheduler)
            if request_id not in self._callback_failed:
                require(checker.final is not None, f"the end of request {request_id} was not reported")
                require(
                    checker.tokens == list(result.tokens),
                    f"request {request_id} was reported other tokens than its result holds",
                )
            self._check_cause(request_id, result.state)
            outcome.completed += result.state is RequestState.COMPLETED
            outcome.cancelled += result.state is RequestState.CANCELLED
            outcome.failed += result.state is RequestState.FAILED
            outcome.tokens += len(result.tokens)
            outcome.predictions_accepted += result.accepted_prediction_count
            outcome.predictions_rejected += result.rejected_prediction_count
        stats = scheduler.stats
        outcome.steps += stats.steps
        outcome.preemptions_by_recompute += stats.preemptions_by_recompute
        outcome.preemptions_by_swap += stats.preemptions_by_swap
        outcome.swaps_failed += stats.swaps_failed
        outcome.steps_failed += stats.steps_failed
        outcome.tokens_cached += stats.prompt_tokens_cached
        outcome.tokens_drafted += stats.tokens_drafted
        outcome.drafts_accepted += stats.drafts_accepted
        outcome.drafts_forced += self.backend.plan_checker.num_forced
        for name in ("plans_beside_paused", "plans_with_idle_work_added", "plans_compared"):
            setattr(outcome, name, getattr(self._idle_checker, name))
        outcome.passed_by_shorter = self.backend.plan_checker.passed
        two_tier = scheduler.kv_cache.two_tier()
        if two_tier is not None:
            outcome.migrations += two_tier.migrations
            outcome.migrations_shared += two_tier.migrations_shared

    def _check_cause(self, request_id: RequestId, state: RequestState) -> None:
        """A request fails, or is cancelled, only for a cause of its own."""
        if state is RequestState.FAILED:
            # After the fault of a whole step, the step is retried. Only a second such fault may end requests.
            has_cause = request_id in self.faults.hit_requests or request_id in self._callback_failed
            require(
                has_cause or self.faults.num_unattributed > 1, f"request {request_id} failed without a cause"
            )
        elif state is RequestState.CANCELLED:
            has_deadline = self.sequences[request_id].deadline_at is not None
            require(
                has_deadline or request_id in self._cancelled, f"request {request_id} ended without a cause"
            )
