"""One iteration of the engine, in two variants: plain, and overlapped (step N+1 is planned while step N runs)."""

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
"""Consecutive failed steps after which the engine stops.

A batch that fails counts three times: the step and its two retried halves. A step with one request counts twice. So the
limit is two batches, or three single requests.
"""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The handle of a plan that the backend did not accept. Its result fails the step and all swaps of the plan."""

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
    """Owns the steps in flight. Holds the lock while it calls the scheduler, never while the backend computes."""

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
        self._in_flight: deque[InFlightStep] = deque()
        self._last_finish = 0.0
        self._max_failed_steps = max_failed_steps
        self._num_failed_steps = 0
        """Consecutive failed steps whose error belongs to no request."""
        self.waits_for_device = False
        """Whether the loop waits for a GPU. This wait may be a busy loop, and its CPU time is no work."""

    def run_plain(self) -> bool:
        """Plans a step, runs it, applies its result. Returns False if there was nothing to do."""
        plan = self._plan()
        if plan is None:
            return False
        self._in_flight.append(self._submit(plan))
        self._finish_oldest()
        return True

    def run_overlapped(self) -> bool:
        """Plans and submits the next step, then waits for the one before it. Returns False if there was nothing to do.

        If the next plan depends on the tokens of the running step, the engine waits for that step first. It then
        submits the next step before it delivers those tokens, so that the device does not wait for the delivery.
        """
        has_waited = False
        # A loop, because several steps may be in flight after an interrupt.
        while self._in_flight and not self._may_plan():
            self._finish_oldest()
            has_waited = True
        plan = self._plan()
        if plan is not None:
            self._in_flight.append(self._submit(plan))
        if not self._in_flight:
            return has_waited
        if plan is None or len(self._in_flight) > 1:
            self._finish_oldest()
        return True

    def drain(self) -> None:
        """Waits for all steps in flight."""
        while self._in_flight:
            self._finish_oldest()

    def drop_in_flight(self) -> None:
        """Drops the steps in flight, which hold memory of the backend. A failed engine does not wait for them."""
        self._in_flight.clear()

    def _may_plan(self) -> bool:
        if not self._in_flight:
            return True
        return self.scheduler.may_plan_ahead and not isinstance(self._in_flight[-1].handle, Rejected)

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
        """Waits for the oldest step in flight, and applies its result. If it failed, all later steps are dropped too."""
        # The step is removed after its result is applied: an interrupt during the wait must not lose it.
        step = self._in_flight[0]
        result = self._result(step)
        now = self._clock()
        # A step that was submitted while another ran began when that one ended.
        seconds = now - max(step.submitted_at, self._last_finish)
        self._last_finish = now
        if result.failed:
            later_results = [self._result(later) for later in list(self._in_flight)[1:]]
            with self._lock:
                self._in_flight.clear()
                self.scheduler.fail(result, later_results)
            if result.errors.keys().isdisjoint(step.plan.request_ids):
                self._count_failure(result.error)
        else:
            self._num_failed_steps = 0
            with self._lock:
                self._in_flight.popleft()
                self.scheduler.apply(step.plan, result, max(0.0, seconds - result.waited))

    def _count_failure(self, error: str | None) -> None:
        """Raises after too many failures in a row: the backend is broken, and the engine must be replaced."""
        self._num_failed_steps += 1
        if self._num_failed_steps == self._max_failed_steps:
            raise WeftError(f"{self._num_failed_steps} steps in a row failed, the last with: {error}")

    def _result(self, step: InFlightStep) -> StepResult:
        self.waits_for_device = bool(self.scheduler.info.device)
        try:
            result = step.handle.result()
        except Exception as error:
            # The outcome of the swaps of this step is unknown, so all swaps in flight count as failed.
            message = _describe(error)
            with self._lock:
                lost = self.scheduler.kv_cache.swaps_in_flight
            return StepResult(error=message, failed_swaps=dict.fromkeys(lost, message))
        finally:
            self.waits_for_device = False
        return _checked(result, step.plan)


def _checked(result: StepResult, plan: IterationPlan) -> StepResult:
    """The result. If it has the wrong number of tokens, it becomes the result of a failed step."""
    expected = plan.num_samples
    if not result.failed and len(result.tokens) != expected:
        message = f"the backend returned {len(result.tokens)} tokens where {expected} were to be sampled"
        return dataclasses.replace(result, error=message)
    return result


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
