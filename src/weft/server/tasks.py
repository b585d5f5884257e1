"""Owns the tasks that go on after the request that began them has ended, such as background responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from weft.server.admission.limits import places_needed
from weft.server.errors import ApiError


class Tasks:
    """Tasks by name. Belongs to one event loop."""

    def __init__(self, most: int, num_keys: int) -> None:
        self._most = most
        self._num_keys = num_keys
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_own = Counter[str]()
        """Owner -> the number of running tasks of this owner."""

    def check_capacity(self, owner: str) -> None:
        """Raises a 429 if no more tasks of this owner may start. One key may not take all places, because a task may wait
        for hours."""
        total, own = len(self._tasks), self._num_own[owner]
        if places_needed(own, self._most - total, self._num_keys):
            message = (
                f"{total} requests run in the background, {own} of them with this key; allowed: {self._most} for all "
                "keys together (max_requests); try again later"
            )
            raise ApiError(429, message, code="queue_full")

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def start(self, name: str, owner: str, work: Coroutine[Any, Any, None]) -> None:
        def remove(_: object) -> None:
            del self._tasks[name]
            self._num_own[owner] -= 1

        self._num_own[owner] += 1
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(remove)

    async def cancel(self, name: str) -> None:
        """Cancels a task and waits for its end. Without effect if there is none with this name."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def close(self) -> None:
        """Cancels all tasks and waits for their end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
