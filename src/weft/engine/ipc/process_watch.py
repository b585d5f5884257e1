"""Watches the engine's process for the client: whether it makes progress, its stack traces, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial

from weft.engine.ipc.launch import LaunchedEngine
from weft.engine.ipc.liveness import CHECK_SECONDS, Liveness, work_of, work_of_children

_STACKS_SECONDS = 2.0
"""A stuck process has this long to write the stack traces of its threads."""
_MAX_STACK_BYTES = 1 << 18


class WatchedProcess:
    """Owns the process. Use it from one event loop only."""

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
        """Waits for `event`. Returns False if the process gets stuck first."""
        while not event.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await event.wait()
            self.liveness.check()
            if self.liveness.is_stalled:
                return False
        return True

    async def dump_stacks(self) -> None:
        """Makes the process write the stack traces of its threads, if it still can."""
        # A stopped process handles SIGUSR1 only after SIGCONT has resumed it.
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self.process.send_signal(number)
        before = b""
        for _ in range(round(_STACKS_SECONDS / 0.1)):
            await asyncio.sleep(0.1)
            written = self._written()
            if written and written == before:
                return
            before = written

    async def end(self, timeout: float) -> str:
        """Waits for the end of the process; kills it after `timeout` seconds. Returns the stack traces that it
        wrote."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout
        # Polls instead of waiting in a thread: the system may have no thread left.
        while self.process.poll() is None:
            if loop.time() >= give_up_at:
                self.process.kill()
            await asyncio.sleep(0.01)
        written = self._written()
        self._stacks.close()
        return written.decode(errors="replace")

    def _written(self) -> bytes:
        return b"" if self._stacks.closed else os.pread(self._stacks.fileno(), _MAX_STACK_BYTES, 0)
