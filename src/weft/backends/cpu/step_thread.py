"""The thread that runs the steps of the CPU backend, one behind the other, and when it tells that one is over.

Whoever waits for a step is woken to apply it and to plan another, and takes the interpreter for that. Woken at the end of
the step, it would take it from this thread, which has the next step to begin, and the cores would wait for both. So a
step with another behind it is told when that one begins to compute, for which nobody needs the interpreter. And whoever
submits a step for which the cores wait already lets it begin before going on: what else there is to do can be done meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

from weft.backends.cpu.memory_ahead import MemoryAhead
from weft.plan import StepResult

_IDLE_SECONDS = 0.01
"""After so long without a step the next one is not about to come."""

_BEGINNING_SECONDS = 0.001
"""How long a step may take to begin before whoever submitted it goes on all the same: it has something else to do first."""


class QueuedStep:
    """A step under way; a `StepHandle`."""

    __slots__ = ("_has_begun", "_is_beginning", "_is_told", "_outcome", "_run")

    def __init__(self, run: Callable[[QueuedStep], None]) -> None:
        self._run: Callable[[QueuedStep], None] | None = run
        self._outcome: StepResult | BaseException | None = None
        self._is_told = threading.Lock()
        self._is_told.acquire()
        self._has_begun = False
        self._is_beginning = threading.Lock()
        self._is_beginning.acquire()

    @property
    def is_told(self) -> bool:
        return self._outcome is not None

    def begin(self) -> None:
        """In the thread, when it computes, or is over without that."""
        if not self._has_begun:
            self._has_begun = True
            self._is_beginning.release()

    def wait_until_it_begins(self) -> None:
        """By one thread."""
        self._is_beginning.acquire(timeout=_BEGINNING_SECONDS)

    def run(self) -> None:
        """In the thread."""
        assert self._run is not None, "a step runs once"
        self._run(self)
        self._run = None  # whoever keeps a step keeps no more than its outcome

    def tell(self, outcome: StepResult | BaseException) -> None:
        """In the thread."""
        self._outcome = outcome
        self._is_told.release()

    def result(self) -> StepResult:
        with self._is_told:
            assert self._outcome is not None
            if isinstance(self._outcome, BaseException):
                raise self._outcome
            return self._outcome


class StepThread:
    """Runs steps in the order in which they are submitted; while there are none it takes memory for those to come."""

    def __init__(self, name: str) -> None:
        self._steps: SimpleQueue[QueuedStep | MemoryAhead | None] = SimpleQueue()
        self._newest: QueuedStep | None = None
        self._running: QueuedStep | None = None
        self._untold: tuple[QueuedStep, StepResult | BaseException] | None = None
        thread = threading.Thread(target=_work, args=(self._steps,), name=name, daemon=True)
        # Also where nobody closes it: when it is forgotten, or before the interpreter ends under a step.
        self._end = weakref.finalize(self, _end, self._steps, thread)
        thread.start()

    def submit(self, run: Callable[[], StepResult]) -> QueuedStep:
        if not self._end.alive:
            raise RuntimeError("the backend is closed and runs no more steps")
        step = QueuedStep(lambda step: self._run(step, run))
        is_awaited = self._newest is None or self._newest.is_told
        self._newest = step
        self._steps.put(step)
        if is_awaited:
            step.wait_until_it_begins()
        return step

    def take_ahead(self, memory: MemoryAhead) -> None:
        """This is the memory of the steps to come; from now on it belongs to the thread. Not while a step is under way: it
        would take this for one behind it."""
        self._steps.put(memory)

    def close(self) -> None:
        """Waits for what was submitted."""
        self._end()

    # -- in the thread

    def tell(self) -> None:
        """Tells of the step before, and that this one begins; called by one that is about to compute."""
        if self._running is not None:
            self._running.begin()
        if self._untold is not None:
            (step, outcome), self._untold = self._untold, None
            step.tell(outcome)

    def _run(self, step: QueuedStep, run: Callable[[], StepResult]) -> None:
        outcome: StepResult | BaseException
        self._running = step
        try:
            outcome = run()
        except BaseException as error:
            outcome = error
        self.tell()  # where it had nothing to compute
        self._running = None
        self._untold = step, outcome
        if self._steps.empty() or not self._end.alive:  # what is behind it may be the end, which tells nobody
            self.tell()


def _work(steps: SimpleQueue[QueuedStep | MemoryAhead | None]) -> None:
    """Holds no thread object and no backend: they can be forgotten while it waits."""
    memory: MemoryAhead | None = None
    while (next_one := _next(steps, memory)) is not None:
        if isinstance(next_one, QueuedStep):
            next_one.run()
        else:
            memory = next_one
        del next_one


def _next(
    steps: SimpleQueue[QueuedStep | MemoryAhead | None], memory: MemoryAhead | None
) -> QueuedStep | MemoryAhead | None:
    patience = _IDLE_SECONDS
    while memory is not None and memory.is_wanting:
        try:
            return steps.get(timeout=patience)
        except Empty:
            memory.take_some()
            patience = 0.0
    return steps.get()


def _end(steps: SimpleQueue[QueuedStep | MemoryAhead | None], thread: threading.Thread) -> None:
    steps.put(None)
    if thread is not threading.current_thread():
        thread.join()
