"""Whose turn it is in the event loop: as many pieces of work at once as keep it quick, however many wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SLICE_SECONDS = 0.004
"""One round of the event loop should take no longer: whoever is not paced (a new connection, a question for the
server's health) needs about five rounds, and a server with hundreds of streams must not let it wait for each of them."""
_INITIAL_TURNS = 16


class LoopTurns:
    """Lets so many go on in each round of the loop as the last rounds had time for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._per_iteration = float(_INITIAL_TURNS)
        self._left = _INITIAL_TURNS
        self._waiting: deque[asyncio.Future[None] | Callable[[], object]] = deque()
        self._is_counting = False
        self._began = 0.0

    async def wait(self) -> None:
        """Returns at once while the round has time, else in the first round that has, first come first served."""
        if not self._is_counting:
            self._count()
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def call_in_turn(self, work: Callable[[], object]) -> None:
        """Calls `work` later, in the first round that has time: a turn for who has no task that would have to be woken."""
        if not self._is_counting:
            self._count()
        self._waiting.append(work)

    def _count(self) -> None:
        self._is_counting, self._began = True, time.thread_time()
        asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._adapt()
        self._left = int(self._per_iteration)
        has_woken = False
        try:
            for _ in range(len(self._waiting)):  # whoever asks again meanwhile has had a turn
                if not self._left:
                    break
                waiting = self._waiting.popleft()
                if not isinstance(waiting, asyncio.Future):
                    self._left -= 1
                    waiting()
                elif not waiting.done():  # whoever waited may be gone
                    self._left -= 1
                    waiting.set_result(None)
                    has_woken = True
        finally:
            self._is_counting = has_woken or bool(self._waiting)
            if self._is_counting:
                asyncio.get_running_loop().call_soon(self._next_iteration)
            else:
                self._adapt()  # all that was to be done is done

    def _adapt(self) -> None:
        """How many a round has time for, from how long the last one took. The time of this thread: what others take from it
        on a busy machine they take from a short round too."""
        now = time.thread_time()
        seconds, self._began = now - self._began, now
        if seconds > _SLICE_SECONDS:
            self._per_iteration = max(1.0, self._per_iteration * max(0.5, _SLICE_SECONDS / seconds))
        elif self._waiting and not self._left:  # some were left over, though there was time
            self._per_iteration += 1.0
