"""Limits the work per iteration of the event loop, so that an iteration stays short however many streams have work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SLICE_SECONDS = 0.004
"""Target time for one iteration of the event loop. Work that needs no turn (a new connection, /health) takes about five
iterations. Such work must not wait for hundreds of streams in each of them."""
_INITIAL_TURNS = 16


class LoopTurns:
    """Grants turns. The number per iteration adapts to the time that recent iterations took. Belongs to one event
    loop."""

    def __init__(self) -> None:
        self._per_iteration = float(_INITIAL_TURNS)
        self._left = _INITIAL_TURNS
        self._waiting: deque[asyncio.Future[None] | Callable[[], object]] = deque()
        self._is_counting = False
        self._began = 0.0

    async def wait(self) -> None:
        """Waits for a turn: returns at once while this iteration has turns left, else in a later one, in FIFO order."""
        if not self._is_counting:
            self._count()
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def call_in_turn(self, work: Callable[[], object]) -> None:
        """Calls `work` in a later iteration that has a turn left. Cheaper than `wait`: no task is woken."""
        if not self._is_counting:
            self._count()
        self._waiting.append(work)

    def _count(self) -> None:
        """Runs `_next_iteration` in the next iteration of the event loop, and then as long as work waits for turns."""
        self._is_counting, self._began = True, time.thread_time()
        asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        """Gives the turns of this iteration to the work that waits, in the order of its arrival."""
        self._adapt()
        self._left = int(self._per_iteration)
        has_woken = False
        try:
            for _ in range(len(self._waiting)):  # work added during this loop waits for the next iteration
                if not self._left:
                    break
                waiting = self._waiting.popleft()
                if not isinstance(waiting, asyncio.Future):
                    self._left -= 1
                    waiting()
                elif not waiting.done():  # else the wait was cancelled
                    self._left -= 1
                    waiting.set_result(None)
                    has_woken = True
        finally:
            self._is_counting = has_woken or bool(self._waiting)
            if self._is_counting:
                asyncio.get_running_loop().call_soon(self._next_iteration)
            else:
                self._adapt()  # the last iteration counts too

    def _adapt(self) -> None:
        """Adapts the number of turns to the time of the last iteration. That is the CPU time of this thread: the time that
        other programs take does not depend on the number of turns."""
        now = time.thread_time()
        seconds, self._began = now - self._began, now
        if seconds > _SLICE_SECONDS:
            self._per_iteration = max(1.0, self._per_iteration * max(0.5, _SLICE_SECONDS / seconds))
        elif self._waiting and not self._left:  # the iteration was short, and work was left over
            self._per_iteration += 1.0
