"""Decides which attached file is read next: of each key the oldest, in turn. Owns the task that reads them."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable
from contextlib import suppress

from weft.errors import WeftError
from weft.server.errors import ApiError
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.ingest import Ingest
from weft.server.state import passages, vector_stores
from weft.server.state.store import Store, StoreError
from weft.server.vectors.interface import ENGINE_NOT_READY, ENGINE_NOT_RESPONDING

_POLL_SECONDS = 30.0
"""How often the runner reads the store. Another server with the same folder may have attached a file."""
_SWEEP_SECONDS = 600.0
_RETRY_SECONDS = 2.0
_MAX_TRIES = 5
"""A file fails after so many errors that are not its own, such as an engine that died while it read the file. The time
until the engine is ready again does not count."""


class IngestRunner:
    """Belongs to one event loop. The primary server of a folder reads files; others only make rows."""

    def __init__(
        self,
        store: Store,
        indexes: StoreIndexes,
        ingest: Callable[[], Ingest | None],
        log: Callable[..., object],
        is_draining: Callable[[], bool],
    ) -> None:
        """`ingest` returns None while the server has no embedding model: files wait."""
        self._store = store
        self._indexes = indexes
        self._ingest = ingest
        self._log = log
        self._is_draining = is_draining
        self._wake = asyncio.Event()
        self._last_owner = ""
        self._swept_at = -math.inf
        self._tries: dict[int, int] = {}
        """Number of a file -> how often its ingestion has failed."""

    def wake(self) -> None:
        """Makes the runner read the store now."""
        self._wake.set()

    async def run(self) -> None:
        """Reads files until it is cancelled."""
        if not self._store.exists:  # a server without files does not open the database when it starts
            await self._wake.wait()
        while True:
            self._wake.clear()
            seconds = _POLL_SECONDS
            try:
                if await self._step():
                    continue
            except StoreError as error:
                self._log("memory_waits", f"Files of vector stores wait: {error}", "warning")
                seconds = _RETRY_SECONDS
            except Exception as error:  # the files must not wait for a restart of the server
                frames = "".join(traceback.format_tb(error.__traceback__))
                message = f"{type(error).__name__} while a file of a vector store was read"
                self._log("mistake", message, "error", traceback=frames)
                seconds = _RETRY_SECONDS
            # Not `wait_for`: before Python 3.12 it loses a cancel that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def _step(self) -> bool:
        """Does one piece of work. Returns whether more may be there."""
        now = self._store.wall_clock()
        waiting = await self._store.run(lambda connection: vector_stores.next_files(connection, now))
        if not self._store.is_primary or self._is_draining():
            return False
        if abs(now - self._swept_at) >= _SWEEP_SECONDS:  # abs: an operator may set the clock back
            self._swept_at = now
            await self._indexes.remove_leftovers()
        ingest = self._ingest()
        if waiting and ingest is not None:
            waiting.sort(key=lambda one: one[0])
            owner, file = next((one for one in waiting if one[0] > self._last_owner), waiting[0])
            self._last_owner = owner
            try:
                await ingest.run(owner, file)
                self._tries.pop(file.number, None)
            except StoreError:
                raise
            except (WeftError, ApiError) as error:
                await self._try_again(file, error)
            return True
        return await self._store.run(lambda connection: passages.remove_leftovers(connection, now))

    async def _try_again(self, file: vector_stores.AttachedFile, error: Exception) -> None:
        is_waiting = isinstance(error, ApiError) and error.code in (ENGINE_NOT_READY, ENGINE_NOT_RESPONDING)
        tries = self._tries[file.number] = self._tries.get(file.number, 0) + (not is_waiting)
        if tries < _MAX_TRIES:
            await asyncio.sleep(_RETRY_SECONDS)
            return
        del self._tries[file.number]
        failed = vector_stores.FileError("server_error", f"{tries} tries failed: {error}")
        await self._store.run(
            lambda connection: vector_stores.finish(connection, file.number, "failed", error=failed)
        )
