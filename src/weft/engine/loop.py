"""One iteration of the engine, in two ways: plain, and overlapped (step N+1 is planned while N runs)."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from dataclasses import dataclass

from weft.backends.base import Backend, StepHandle
from weft.clock import Clock
from weft.errors import WeftError
from weft.plan import IterationPlan, StepResult
from weft.scheduling.scheduler import ContinuousBatchScheduler

MAX_FAILED_STEPS = 6
"""Steps in a row. A step that fails as a whole counts three times: itself and its two halves. One with a single request
counts twice. So this is two batches, or three requests alone."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Stands for a plan that the backend did not accept: no step, and none of its swaps."""

    plan: IterationPlan
    error: str

    def result(self) -> StepResult:
        swaps = (*self.plan.swap_out, *self.plan.swap_in)
        return StepResult(error=self.error, failed_swaps={task.swap_id: self.error for task in swaps})


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: IterationPlan
    handle: StepHandle
    submitted_at: float


class EngineCore:
    """Owns the steps in flight. The lock is held while the scheduler works, never while the backend does."""

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        backend: Backend,
        clock: Clock,
        lock: threading.RLock,
        max_failed_steps: int | None = MAX_FAILED_STEPS,
    ) -> None:
        self.scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._lock = lock
        self._flights: deque[InFlightStep] = deque()
        self._last_finish = 0.0
        self._max_failed_steps = max_failed_steps
        self._num_failed_steps = 0
        """Failed steps in a row, each with an error that belongs to no request."""

    def run_plain(self) -> bool:
        """Plan, run, apply. False: there was nothing to do."""
        plan = self._plan()
        if plan is None:
            return False
        self._flights.append(self._submit(plan))
        self._finish_oldest()
        return True

    def run_overlapped(self) -> bool:
        """Plan and submit the next step, then wait for the one before it. False: there was nothing to do.

        Where the next step follows from the tokens of this one, it is planned once they are here, before anyone is told of
        them: nobody waits for tokens as long as the device waits for work.
        """
        has_waited = False
        while self._flights and not self._may_plan():  # more than one where an interrupt came between
            self._finish_oldest()
            has_waited = True
        plan = self._plan()
        if plan is not None:
            self._flights.append(self._submit(plan))
        if not self._flights:
            return has_waited
        if plan is None or len(self._flights) > 1:
            self._finish_oldest()
        return True

    def drain(self) -> None:
        """Waits for all steps in flight."""
        while self._flights:
            self._finish_oldest()

    def forget(self) -> None:
        """Drops the steps in flight: an engine that failed does not wait for them, and they hold memory of the backend."""
        self._flights.clear()

    def _may_plan(self) -> bool:
        if not self._flights:
            return True
        return self.scheduler.may_plan_ahead and not isinstance(self._flights[-1].handle, Rejected)

    def _plan(self) -> IterationPlan | None:
        with self._lock:
            return self.scheduler.schedule()

    def _submit(self, plan: IterationPlan) -> InFlightStep:
        submitted_at = self._clock()
        try:
            handle = self._backend.submit(plan)
        except Exception as error:
            handle = Rejected(plan, _describe(error))
        return InFlightStep(plan, handle, submitted_at)

    def _finish_oldest(self) -> None:
        # Taken out when it is booked, not before: an interrupt while waiting must not lose a step.
        flight = self._flights[0]
        result = self._result(flight)
        now = self._clock()
        seconds = now - max(flight.submitted_at, self._last_finish)
        self._last_finish = now
        if result.failed:
            behind = [self._result(later) for later in list(self._flights)[1:]]
            with self._lock:
                self._flights.clear()
                self.scheduler.fail(result, behind)
            if result.errors.keys().isdisjoint(flight.plan.request_ids):
                self._count_failure(result.error)
        else:
            self._num_failed_steps = 0
            with self._lock:
                self._flights.popleft()
                self.scheduler.apply(flight.plan, result, seconds)

    def _count_failure(self, error: str | None) -> None:
        """Raises where the backend seems to be broken for good: the engine has to be replaced."""
        self._num_failed_steps += 1
        if self._num_failed_steps == self._max_failed_steps:
            raise WeftError(f"{self._num_failed_steps} steps in a row failed, the last with: {error}")

    def _result(self, flight: InFlightStep) -> StepResult:
        try:
            result = flight.handle.result()
        except Exception as error:
            # What it would have said about swaps is lost with it: all that are under way count as failed.
            message = _describe(error)
            with self._lock:
                lost = self.scheduler.kv_cache.swaps_in_flight
            return StepResult(error=message, failed_swaps=dict.fromkeys(lost, message))
        return _checked(result, flight.plan)


def _checked(result: StepResult, plan: IterationPlan) -> StepResult:
    expected = plan.num_samples
    if not result.failed and len(result.tokens) != expected:
        message = f"the backend returned {len(result.tokens)} tokens where {expected} were to be sampled"
        return dataclasses.replace(result, error=message)
    return result


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
