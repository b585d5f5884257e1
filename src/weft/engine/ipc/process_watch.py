"""The engine's process, seen from its client: whether it is alive, what its threads do, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial

from weft.engine.ipc.launch import LaunchedEngine
from weft.engine.ipc.liveness import LOOK_SECONDS, Liveness, work_of, work_of_children

_STACKS_SECONDS = 2.0
"""A process that is stuck has this long to write what its threads are doing."""
_MOST_STACK_BYTES = 1 << 18


class WatchedProcess:
    """Owns the process. Belongs to one event loop."""

    def __init__(self, launched: LaunchedEngine, stall_seconds: float) -> None:
        self.process = launched.process
        self._stacks = launched.stacks
        process_id = self.process.pid
        self.liveness = Liveness(
            stall_seconds,
            asyncio.get_running_loop().time,
            partial(work_of, process_id),
            partial(work_of_children, process_id),
        )

    async def is_alive_until(self, event: asyncio.Event) -> bool:
        """Whether `event` comes before the process is found stuck."""
        while not event.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await event.wait()
            self.liveness.look()
            if self.liveness.is_stalled:
                return False
        return True

    async def dump_stacks(self) -> None:
        """Makes the process write what its threads are doing, where it still can."""
        # A stopped process gets to the first signal when the second one wakes it.
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self.process.send_signal(number)
        before = b""
        for _ in range(round(_STACKS_SECONDS / 0.1)):
            await asyncio.sleep(0.1)
            written = self._written()
            if written and written == before:
                return
            before = written

    async def end(self, patience: float) -> str:
        """Waits for the end of the process, and kills it where that takes longer. Returns what it wrote of its threads."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience
        # Polled, not waited for in a thread: it may be impossible to start one.
        while self.process.poll() is None:
            if loop.time() >= give_up_at:
                self.process.kill()
            await asyncio.sleep(0.01)
        written = self._written()
        self._stacks.close()
        return written.decode(errors="replace")

    def _written(self) -> bytes:
        return b"" if self._stacks.closed else os.pread(self._stacks.fileno(), _MOST_STACK_BYTES, 0)
