"""Shares the cores between engine processes of one server: only the process that holds the lease computes.

The thread pool of each engine has a thread for every core. Two pools that compute at the same time wait for each other's
threads in every phase of a step. The lease is two locks on bytes of a shared file, which the kernel releases when a
process dies:

    NEXT    held by the process that gets the cores next
    CORES   held by the process that computes

A process takes NEXT, then CORES, and gives NEXT back. So a process that releases the cores cannot take them again while
another one waits. Each process also writes down how long its last step took. A process with short steps keeps the cores
for several steps: until it has had them as long as one step of the others takes. So all get the same time.
"""

from __future__ import annotations

import fcntl
import mmap
import threading
import time
from queue import SimpleQueue

_PLACES = 8
"""How many processes the file has room for."""
_NEXT, _CORES = 8 * _PLACES, 8 * _PLACES + 1
_MAX_WAIT = 1.0
"""After so many seconds a step computes without the lease: the process that holds it may be stopped or stuck."""


class _Waiter:
    """One wait for the lease."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self.is_abandoned = False


class CoreLease:
    """The lease as one process sees it. Used by the thread that runs its steps."""

    def __init__(self, descriptor: int, place: int) -> None:
        """`descriptor`: the shared file. `place`: the number of this process among those that share it."""
        self._file = descriptor
        self._seconds = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")
        """By place: the duration of the last step of a process that has another step to run, else 0."""
        self._place = place
        self._seconds[place] = 0.0
        self._is_held = False
        self._taken_at = self._began_at = 0.0
        self._mutex = threading.Lock()
        self._waiters: SimpleQueue[_Waiter] = SimpleQueue()
        self._waiting: _Waiter | None = None
        """The wait that a thread does now: locks of files have no timeout."""
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Called before a step computes. Waits until the other processes do not."""
        if not self._is_held:
            self._is_held = self._try() or self._wait()
            self._taken_at = time.monotonic()
        self._began_at = time.monotonic()

    def end_step(self, *, has_next: bool) -> None:
        """Called after a step. Gives the lease back, unless another step follows and the time of this process is not
        over."""
        now = time.monotonic()
        self._seconds[self._place] = now - self._began_at if has_next else 0.0
        if self._is_held and not (has_next and now - self._taken_at < self._longest_step_of_others()):
            self._is_held = False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _CORES)

    def _longest_step_of_others(self) -> float:
        return max(self._seconds[place] for place in range(_PLACES) if place != self._place)

    def _try(self) -> bool:
        """Takes the lease if no process holds it or waits for it."""
        if self._waiting is not None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _NEXT)
        except BlockingIOError:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CORES)
        except BlockingIOError:
            return False  # this process keeps NEXT
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _NEXT)
        return True

    def _wait(self) -> bool:
        """Waits in a second thread, so that the wait can end. Returns False if this step has to compute without the
        lease."""
        with self._mutex:
            if self._waiting is not None:
                return False  # an earlier step gave up, and the lease was not free since
            waiter = self._waiting = _Waiter()
        if self._thread is None:
            self._thread = threading.Thread(target=self._take_in_thread, name="weft-cores", daemon=True)
            self._thread.start()
        self._waiters.put(waiter)
        if waiter.granted.wait(_MAX_WAIT):
            return True
        with self._mutex:
            waiter.is_abandoned = self._waiting is waiter
            return not waiter.is_abandoned

    def _take_in_thread(self) -> None:
        while True:
            waiter = self._waiters.get()
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _NEXT)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _CORES)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _NEXT)
            with self._mutex:
                self._waiting = None
                if waiter.is_abandoned:
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _CORES)
                else:
                    waiter.granted.set()
