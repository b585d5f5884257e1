"""A bounded buffer between the engine's thread and an asyncio reader. It never blocks the engine."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from weft.request import TokenOutput

if TYPE_CHECKING:
    import asyncio


class TokenBuffer:
    """Written by the engine's thread, read by one task of an event loop. Wakes the reader once, not for each token."""

    def __init__(self, capacity: int, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio  # not at the top: the engine's process has no event loop and starts faster without it

        self._capacity = capacity
        self._loop = loop
        self._lock = threading.Lock()
        self._outputs: deque[TokenOutput] = deque()
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput) -> bool:
        """Adds an output. Returns False if the buffer is full or the reader's event loop is closed. Accepts the final
        output even if the buffer is full."""
        with self._lock:
            if len(self._outputs) >= self._capacity and not output.is_final:
                return False
            self._outputs.append(output)
            must_wake = len(self._outputs) == 1
        try:
            if must_wake:
                self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the event loop of the reader is closed
            return False
        return True

    async def get(self) -> list[TokenOutput]:
        """Waits for at least one output and returns all that have arrived."""
        while True:
            with self._lock:
                if self._outputs:
                    taken = list(self._outputs)
                    self._outputs.clear()
                    return taken
                self._arrived.clear()
            await self._arrived.wait()
