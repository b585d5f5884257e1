"""Owns the tasks that go on after the request that began them has ended, such as background responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from weft.server.errors import ApiError


class Tasks:
    """Tasks by name. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check_capacity(self) -> None:
        """Raises a 429 if no more tasks may start."""
        if len(self._tasks) >= self._most:
            message = (
                f"{len(self._tasks)} requests run in the background; allowed: {self._most}; try again later"
            )
            raise ApiError(429, message, code="queue_full")

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._tasks.pop(name))

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
