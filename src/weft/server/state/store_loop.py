"""A task that does the work that rows of the store describe. It reads the store when it is woken, and regularly."""

from __future__ import annotations

import asyncio
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from weft.server.state.store import Store, StoreError

POLL_SECONDS = 30.0
"""Seconds between two reads of the store. Another server with the same folder may have changed it."""
_SWEEP_SECONDS = 600.0


class StoreLoop(ABC):
    """Belongs to one event loop. The primary server of a folder does the work; other servers only add rows."""

    event: ClassVar[str]
    """The name of the log entry for an error."""
    work: ClassVar[str]
    """The name of the work that waits after an error, for the message of this log entry."""
    retry_seconds: ClassVar[float] = POLL_SECONDS
    """Seconds until the next try after an error."""

    def __init__(self, store: Store, log: Callable[..., object], is_draining: Callable[[], bool]) -> None:
        self._store = store
        self._log = log
        self._is_draining = is_draining
        self._wake = asyncio.Event()
        self._swept_at = -math.inf

    def wake(self) -> None:
        """Makes the task read the store now."""
        self._wake.set()

    async def run(self) -> None:
        """Works until it is cancelled."""
        if not self._store.exists:  # reading would make a database for a server without such work
            await self._wake.wait()
        while True:
            self._wake.clear()
            seconds = self.retry_seconds
            try:
                seconds = await self._look()
            except StoreError as error:
                self._log(self.event, f"{self.work} wait: {error}", "warning")
            except Exception as error:  # the work must not wait for a restart of the server
                self._log_mistake(error, f"{self.work.lower()} were looked for")
            # Not `wait_for`: before Python 3.12 it loses a cancel that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    @abstractmethod
    async def _look(self) -> float:
        """Reads the store and works. Returns the seconds until the store must be read again."""

    @abstractmethod
    async def _sweep(self, now: float) -> None:
        """Removes leftovers, such as files without a row."""

    async def _may_work(self, now: float) -> bool:
        """Whether this server does the work. Also calls `_sweep` if that is due. Call it after a transaction: the first one
        decides whether this server is the primary one."""
        if not self._store.is_primary or self._is_draining():
            return False
        if abs(now - self._swept_at) >= _SWEEP_SECONDS:  # abs: an operator may set the clock back
            self._swept_at = now
            await self._sweep(now)
        return True

    def _log_mistake(self, error: BaseException, what: str) -> None:
        """Logs where an unexpected exception was raised, without its message, which may quote a request."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        self._log("mistake", f"{type(error).__name__} while {what}", "error", traceback=frames)
