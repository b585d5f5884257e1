"""Decides which attached file is read next: the oldest of each API key, in rotation. Owns the task that reads the files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.errors import WeftError
from weft.server.errors import ApiError
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.ingest import Ingest
from weft.server.state import passages, vector_stores
from weft.server.state.store import Store, StoreError
from weft.server.state.store_loop import POLL_SECONDS, StoreLoop
from weft.server.vectors.interface import ENGINE_NOT_READY, ENGINE_NOT_RESPONDING

_RETRY_SECONDS = 2.0
_MAX_TRIES = 5
"""A file fails after this many errors that it did not cause, such as a crash of the engine. Tries while the engine
is not ready do not count."""


class IngestRunner(StoreLoop):
    """Reads files until it is cancelled. Call `wake` after files were attached or removed."""

    event, work, retry_seconds = "memory_waits", "Files of vector stores", _RETRY_SECONDS

    def __init__(
        self,
        store: Store,
        indexes: StoreIndexes,
        ingest: Callable[[], Ingest | None],
        log: Callable[..., object],
        is_draining: Callable[[], bool],
    ) -> None:
        """`ingest` returns None while the server has no embedding model. Files wait until it has one."""
        super().__init__(store, log, is_draining)
        self._indexes = indexes
        self._ingest = ingest
        self._last_owner = ""
        self._tries: dict[int, int] = {}
        """Number of a file -> how often its ingestion has failed."""

    async def _look(self) -> float:
        """Reads one waiting file. Without one, removes some leftovers. Returns the seconds until the next look."""
        now = self._store.wall_clock()
        waiting = await self._store.run(lambda connection: vector_stores.next_files(connection, now))
        if not await self._may_work(now):
            return POLL_SECONDS
        ingest = self._ingest()
        if waiting and ingest is not None:
            waiting.sort(key=lambda one: one[0])
            owner, file = next((one for one in waiting if one[0] > self._last_owner), waiting[0])
            self._last_owner = owner
            try:
                num_passages = await ingest.run(owner, file)
            except StoreError:
                raise
            except Exception as error:
                if not isinstance(error, WeftError | ApiError):
                    self._log_mistake(error, "a file of a vector store was read")
                await self._wait_or_fail(file, error)
                return 0.0
            self._tries.pop(file.number, None)
            await self._indexes.passages_added(file.store, num_passages)
            return 0.0
        has_more = await self._store.run(lambda connection: passages.remove_leftovers(connection, now))
        return 0.0 if has_more else POLL_SECONDS

    async def _sweep(self, now: float) -> None:
        await self._indexes.remove_leftovers()

    async def _wait_or_fail(self, file: vector_stores.AttachedFile, error: Exception) -> None:
        """Waits before the next try of a file. After too many tries, sets the status `failed`."""
        is_waiting = isinstance(error, ApiError) and error.code in (ENGINE_NOT_READY, ENGINE_NOT_RESPONDING)
        tries = self._tries[file.number] = self._tries.get(file.number, 0) + (not is_waiting)
        if tries < _MAX_TRIES:
            await asyncio.sleep(_RETRY_SECONDS)
            return
        del self._tries[file.number]
        # The message of an unexpected exception may quote the file or this server's paths.
        reason = (
            str(error) if isinstance(error, WeftError | ApiError) else f"a mistake ({type(error).__name__})"
        )
        failed = vector_stores.FileError("server_error", f"{tries} tries failed: {reason}")
        await self._store.run(
            lambda connection: vector_stores.finish(connection, file.number, "failed", error=failed)
        )
