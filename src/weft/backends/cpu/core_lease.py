"""Shares the cores between engine processes of one server: only the process that holds the lease computes.

The thread pool of each engine has a thread for every core. Two pools that compute at the same time wait for each other's
threads in every phase of a step. The lease is two locks on bytes of a shared file, which the kernel releases when a
process dies:

    NEXT    held by the process that gets the cores next
    CORES   held by the process that computes

A process takes NEXT, then CORES, and gives NEXT back. So a process that releases the cores cannot take them again while
another one waits.

A step of one model may take many times as long as a step of another. Each process writes down how long its last step
took. A process that takes the cores right after another one keeps them for as long as that step took, if it has so much
work. So all processes get the same time.
"""

from __future__ import annotations

import fcntl
import mmap
import threading
import time
from queue import SimpleQueue

_PLACES = 8
"""How many processes the file has room for."""
_NEXT, _CORES = 16 * _PLACES, 16 * _PLACES + 1
KEPT_SECONDS = 0.003
"""A process keeps the cores for this long after a step. The next decode of a sequence follows within this time."""
_RECENT_SECONDS = 0.05
"""A process whose last step ended longer ago is idle."""
_MAX_WAIT = 1.0
"""After this many seconds a step computes without the lease: the process that holds it may be stopped or stuck."""


class _Waiter:
    """One wait for the lease."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self.is_abandoned = False


class CoreLease:
    """The lease as one process sees it. Used by the thread that runs the steps of this process."""

    def __init__(self, descriptor: int, place: int) -> None:
        """`descriptor`: the shared file. `place`: the number of this process among those that share it."""
        self.is_held = False
        self._file = descriptor
        shared = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")
        self._seconds = shared[:_PLACES]
        """Place of a process -> the duration of its last step."""
        self._ended_at = shared[_PLACES : 2 * _PLACES]
        """Place of a process -> when its last step ended, on a clock that all processes share."""
        self._place = place
        self._seconds[place] = self._ended_at[place] = 0.0
        self._began_at = self._keep_until = 0.0
        self._mutex = threading.Lock()
        self._waiters: SimpleQueue[_Waiter] = SimpleQueue()
        self._waiting: _Waiter | None = None
        """The wait that `_thread` does now. File locks have no timeout, so a second thread waits for them."""
        self._thread: threading.Thread | None = None

    def take(self) -> float:
        """Called before a step computes. Waits until no other process computes. Returns the seconds of this wait."""
        began = now = time.monotonic()
        if not self.is_held:
            self.is_held = self._try() or self._wait()
            now = time.monotonic()
            others = (place for place in range(_PLACES) if place != self._place)
            recent = (each for each in others if now - self._ended_at[each] < _RECENT_SECONDS)
            self._keep_until = now + max((self._seconds[each] for each in recent), default=0.0)
        self._began_at = now
        return now - began

    def end_step(self) -> None:
        """Called after a step. Releases the cores if the time of this process is over. Otherwise the process keeps them:
        its next step may follow soon (`KEPT_SECONDS`)."""
        now = self._ended_at[self._place] = time.monotonic()
        self._seconds[self._place] = now - self._began_at
        if now >= self._keep_until:
            self.release()

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _CORES)

    def _try(self) -> bool:
        """Takes the lease if no process holds it or waits for it. Returns whether the lease was taken."""
        if self._waiting is not None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _NEXT)
        except BlockingIOError:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CORES)
        except BlockingIOError:
            return False  # this process keeps NEXT, so it gets the cores next
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _NEXT)
        return True

    def _wait(self) -> bool:
        """Waits for the lease at most `_MAX_WAIT` seconds, through a second thread. Returns False if this step has to
        compute without the lease."""
        with self._mutex:
            if self._waiting is not None:
                return False  # an earlier step gave up, and its wait has not ended since
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
        """Takes the lease for each waiter, in the second thread. If the waiter gave up, releases the lease at once."""
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
