"""Whose turn it is in the event loop: as many pieces of work at once as keep it quick, however many wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque

_SLICE_SECONDS = 0.004
"""One round of the event loop should take no longer: whoever is not paced (a new connection, a question for the
server's health) needs about five rounds, and a server with hundreds of streams must not let it wait for each of them."""
_FIRST_GUESS = 16


class Rounds:
    """Lets so many go on in each round of the loop as the last rounds had time for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._per_round = float(_FIRST_GUESS)
        self._left = _FIRST_GUESS
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False
        self._began = 0.0

    async def turn(self) -> None:
        """Returns at once while the round has time, else in the first round that has, first come first served."""
        if not self._is_counting:
            self._is_counting, self._began = True, time.perf_counter()
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _next_round(self) -> None:
        now = time.perf_counter()
        if now - self._began > _SLICE_SECONDS:
            self._per_round = max(1.0, self._per_round * max(0.5, _SLICE_SECONDS / (now - self._began)))
        elif self._waiting:
            self._per_round += 1.0
        self._began = now
        self._left = int(self._per_round)
        has_work = False
        while self._waiting and self._left:
            future = self._waiting.popleft()
            if not future.done():  # whoever waited may be gone
                future.set_result(None)
                self._left -= 1
                has_work = True
        self._is_counting = has_work
        if has_work:
            asyncio.get_running_loop().call_soon(self._next_round)
