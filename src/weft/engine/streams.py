"""What stands between the engine's thread and an asyncio reader: a bounded buffer that never makes the engine wait."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from weft.request import TokenOutput

if TYPE_CHECKING:
    import asyncio


class TokenBuffer:
    """Filled by the engine's thread, emptied by one reader in an event loop; wakes the reader once, not per token."""

    def __init__(self, capacity: int, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio  # whoever has a loop has it already; the engine's own process has none and starts without

        self._capacity = capacity
        self._loop = loop
        self._lock = threading.Lock()
        self._outputs: deque[TokenOutput] = deque()
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput) -> bool:
        """False: the reader is gone, or too far behind, and is not told. The final output is taken however far."""
        with self._lock:
            if len(self._outputs) >= self._capacity and not output.is_final:
                return False
            self._outputs.append(output)
            must_wake = len(self._outputs) == 1
        try:
            if must_wake:
                self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # its event loop is closed
            return False
        return True

    async def get(self) -> list[TokenOutput]:
        """All that has arrived, at least one."""
        while True:
            with self._lock:
                if self._outputs:
                    taken = list(self._outputs)
                    self._outputs.clear()
                    return taken
                self._arrived.clear()
            await self._arrived.wait()
