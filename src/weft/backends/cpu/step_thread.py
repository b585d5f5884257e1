"""Runs the steps of the CPU backend in one thread, and decides when the result of a step is reported.

Reporting a result wakes the engine thread, which needs the GIL to apply the result and to plan. If that happened at the
end of a step, it would delay the start of the next step, and all cores would wait. So the result of step N is reported
when step N + 1 begins to compute without the GIL. If no step is queued, the result is reported at once.

For the same reason `submit` waits for its step to start if no other step runs: the engine thread does the rest of its
work while the step computes.

A short step that is alone is computed by the thread that asks for its result. To hand it to the other thread, and to
wait for it, would take about a tenth of the time of a query (`AloneStep`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue

from weft.backends.cpu.core_lease import KEPT_SECONDS, CoreLease
from weft.backends.cpu.prefault import Prefaulter
from weft.plan import StepResult

_IDLE_SECONDS = 0.01
"""After this time without a step, the thread counts as idle and prefaults memory."""

_START_SECONDS = 0.001
"""How long `submit` waits for its step to start. The thread may be busy, for example with prefaulting."""


class QueuedStep:
    """A submitted step. Implements `StepHandle`."""

    __slots__ = ("_finish", "_has_started", "_outcome", "_report_lock", "_run", "_start_lock")

    def __init__(
        self, run: Callable[[QueuedStep], None], finish: Callable[[StepResult], StepResult] | None = None
    ) -> None:
        """`finish` adds what other threads computed for the result. The thread that reads the result calls it."""
        self._run: Callable[[QueuedStep], None] | None = run
        self._finish = finish
        self._outcome: StepResult | BaseException | None = None
        self._report_lock = threading.Lock()  # released by `report`
        self._report_lock.acquire()
        self._has_started = False
        self._start_lock = threading.Lock()  # released by `mark_started`
        self._start_lock.acquire()

    @property
    def is_reported(self) -> bool:
        return self._outcome is not None

    def mark_started(self) -> None:
        """Called in the thread when the step begins to compute, or ends without computing."""
        if not self._has_started:
            self._has_started = True
            self._start_lock.release()

    def wait_until_started(self) -> None:
        """Waits until the step has started, at most `_START_SECONDS`. Called by one thread only."""
        self._start_lock.acquire(timeout=_START_SECONDS)

    def run(self) -> None:
        """Runs the step, and stores or reports its result. Called in the thread."""
        assert self._run is not None, "a step runs once"
        self._run(self)
        self._run = None  # a handle that is kept must not keep the inputs of the step alive

    def report(self, outcome: StepResult | BaseException) -> None:
        """Called in the thread. Wakes the thread that waits in `result`."""
        self._outcome = outcome
        self._report_lock.release()

    def result(self) -> StepResult:
        with self._report_lock:
            assert self._outcome is not None
            if isinstance(self._outcome, BaseException):
                raise self._outcome
            return self._outcome if self._finish is None else self._finish(self._outcome)


class AloneStep:
    """A short step that was submitted while no other one ran. Implements `StepHandle`. `result` computes it, unless
    another step was submitted before: then the thread computes both."""

    __slots__ = ("_outcome", "_queued", "_run")

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run: Callable[[], StepResult] | None = run
        self._outcome: StepResult | None = None
        self._queued: QueuedStep | None = None

    def start(self, submit: Callable[[Callable[[], StepResult]], QueuedStep]) -> None:
        """Gives the step to the thread, unless it was computed already."""
        if self._run is not None and self._queued is None:
            self._queued = submit(self._run)

    def result(self) -> StepResult:
        if self._queued is not None:
            return self._queued.result()
        if self._outcome is None:
            assert self._run is not None
            # If an interrupt ends this call, the next call computes the step again.
            self._outcome = self._run()
            self._run = None  # a handle that is kept must not keep the inputs of the step alive
        return self._outcome


class StepThread:
    """Runs steps in the order of submission. Prefaults memory while no step is queued."""

    def __init__(self, name: str, lease: CoreLease | None = None) -> None:
        """`lease` is set if other engines compute on the same cores."""
        self._lease = lease
        self._waited = 0.0
        """Seconds for which the running step has waited for the cores."""
        self._steps: SimpleQueue[QueuedStep | Prefaulter | None] = SimpleQueue()
        self._newest: QueuedStep | None = None
        self._alone: AloneStep | None = None
        """The newest step, if it is short and was submitted while no other one ran."""
        self._running: QueuedStep | None = None
        self._unreported: tuple[QueuedStep, StepResult | BaseException] | None = None
        thread = threading.Thread(target=_work, args=(self._steps, lease), name=name, daemon=True)
        # Ends the thread if `close` was not called: at garbage collection, or when the interpreter exits during a step.
        self._end = weakref.finalize(self, _end, self._steps, thread)
        thread.start()

    def submit(
        self, run: Callable[[], StepResult], finish: Callable[[StepResult], StepResult] | None = None
    ) -> QueuedStep:
        self._start_alone()
        return self._queue(run, finish)

    def submit_short(self, run: Callable[[], StepResult]) -> QueuedStep | AloneStep:
        """Submits a step that is so short that a second thread does not pay. Results must be asked for by the thread that
        submits."""
        self._start_alone()
        # With a lease, all steps run in the thread, which holds it.
        if self._lease is not None or not self._is_idle:
            return self._queue(run)
        self._alone = AloneStep(run)
        return self._alone

    @property
    def _is_idle(self) -> bool:
        return self._newest is None or self._newest.is_reported

    def _start_alone(self) -> None:
        if not self._end.alive:
            raise RuntimeError("the backend is closed and runs no more steps")
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.start(self._queue)

    def _queue(
        self, run: Callable[[], StepResult], finish: Callable[[StepResult], StepResult] | None = None
    ) -> QueuedStep:
        step = QueuedStep(lambda step: self._run(step, run), finish)
        is_idle = self._is_idle
        self._newest = step
        self._steps.put(step)
        if is_idle:
            step.wait_until_started()
        return step

    def prefault_when_idle(self, memory: Prefaulter) -> None:
        """Hands the cache memory to the thread. Must not be called during a step: any item in the queue delays the
        report of that step."""
        self._steps.put(memory)

    def close(self) -> None:
        """Waits for all submitted steps."""
        self._end()

    # -- in the thread

    def report(self) -> None:
        """Called by a step right before it computes. Reports the previous step, and marks this step as started. Then
        waits for the cores if other engines share them."""
        self._report()
        if self._lease is not None:
            self._waited += self._lease.take()

    def _report(self) -> None:
        """`report` without the wait for the cores."""
        if self._running is not None:
            self._running.mark_started()
        if self._unreported is not None:
            (step, outcome), self._unreported = self._unreported, None
            step.report(outcome)

    def _run(self, step: QueuedStep, run: Callable[[], StepResult]) -> None:
        """Runs a step. Its result is reported now if no other step is queued, else by the next step."""
        outcome: StepResult | BaseException
        self._running = step
        try:
            outcome = run()
        except BaseException as error:
            outcome = error
        self._report()  # has no effect, unless `run` ended before it computed anything
        if self._waited and isinstance(outcome, StepResult):
            outcome = replace(outcome, waited=self._waited)
        self._waited = 0.0
        self._running = None
        self._unreported = step, outcome
        # After `close`, the queue may contain only the end marker. Then no later step would report this one.
        is_last = self._steps.empty() or not self._end.alive
        if self._lease is not None:
            self._lease.end_step()
        if is_last:
            self._report()


def _work(steps: SimpleQueue[QueuedStep | Prefaulter | None], lease: CoreLease | None) -> None:
    """The main function of the thread. It refers to no StepThread and no backend, so that both can be garbage-collected."""
    memory: Prefaulter | None = None
    while (item := _next(steps, memory, lease)) is not None:
        if isinstance(item, QueuedStep):
            item.run()
        else:
            memory = item
        del item


def _next(
    steps: SimpleQueue[QueuedStep | Prefaulter | None], memory: Prefaulter | None, lease: CoreLease | None
) -> QueuedStep | Prefaulter | None:
    """Waits for the next item. If none comes soon, releases the cores, and then prefaults memory until one comes."""
    if lease is not None and lease.is_held:
        with suppress(Empty):
            return steps.get(timeout=KEPT_SECONDS)
        lease.release()
    timeout = _IDLE_SECONDS
    while memory is not None and memory.needs_more:
        try:
            return steps.get(timeout=timeout)
        except Empty:
            memory.prefault_some()
            timeout = 0.0
    return steps.get()


def _end(steps: SimpleQueue[QueuedStep | Prefaulter | None], thread: threading.Thread) -> None:
    steps.put(None)
    if thread is not threading.current_thread():
        thread.join()
