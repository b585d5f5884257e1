"""Decides which batches run: for each API key the oldest one that has not ended. Owns the tasks that run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weft.server.api.services import Services
from weft.server.batches.run import BatchRun, LineLimits
from weft.server.batches.sending import LineSender
from weft.server.metrics import ServerMetrics
from weft.server.state import batches as rows
from weft.server.state.batches import Batch
from weft.server.state.store import StoreError
from weft.server.state.store_loop import POLL_SECONDS, StoreLoop

_KEPT_SECONDS = 30 * 86400.0
"""The row of a batch that has ended is deleted this long after the batch was made. Its files are kept."""
_RETRY_SECONDS = 2.0
"""Delay before a batch continues, after a full disk or an error in the code has stopped it."""
_MAX_BYTES = 32 << 20
"""Limit for the bytes of all lines in flight."""


@dataclass(frozen=True)
class _Running:
    batch: Batch
    """The row of the batch when the task began."""
    began: float
    task: asyncio.Task[None]

    def must_stop(self, batch: Batch | None, now: float) -> bool:
        """Whether this task must end. `batch` must run for this owner now; None: no batch. True if that is another batch,
        or if the batch was cancelled, or its completion window has passed, since the task began."""
        if batch is None or batch.id != self.batch.id:
            return True
        is_cancelled = batch.status == "cancelling" != self.batch.status
        return is_cancelled or self.began < batch.expires_at <= now


class BatchRunner(StoreLoop):
    """Runs batches until it is cancelled."""

    event, work = "batches_wait", "Batches"

    def __init__(
        self,
        services: Services,
        metrics: ServerMetrics,
        log: Callable[..., object],
        is_draining: Callable[[], bool],
    ) -> None:
        super().__init__(services.store, log, is_draining)
        self._services = services
        self._metrics = metrics
        self._sender = LineSender(services, is_draining)
        self._keys = {key.owner: key for key in services.settings.api_keys}
        self._max_lines = services.settings.engine.scheduler.sequences_per_step
        self._running: dict[str, _Running] = {}
        """Owner -> the batch of this owner that runs."""
        self._without_key: set[str] = set()
        metrics.batches_running.set_function(lambda: len(self._running))

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await asyncio.gather(*map(self._stop, list(self._running)))

    async def _look(self) -> float:
        """Begins and stops batches according to their rows in the store. Each owner has at most one running batch, the
        oldest. Returns the seconds until the store must be read again."""
        unfinished = await self._store.run(rows.unfinished)
        now = self._store.wall_clock()
        if not await self._may_work(now):
            return POLL_SECONDS
        oldest = {batch.owner: batch for batch in unfinished if self._has_key(batch.owner)}
        for owner, running in list(self._running.items()):
            if running.task.done() or running.must_stop(oldest.get(owner), now):
                await self._stop(owner)
        for owner in oldest.keys() - self._running.keys():
            task = asyncio.create_task(self._run(oldest[owner]))
            self._running[owner] = _Running(oldest[owner], now, task)
        return min([POLL_SECONDS, *(one.expires_at - now for one in oldest.values() if one.expires_at > now)])

    async def _run(self, batch: Batch) -> None:
        """The task of one batch. After an error it waits, so that the batch is not tried again at once."""
        try:
            await BatchRun(
                self._services,
                batch.id,
                self._keys.get(batch.owner),
                self._sender,
                self._metrics,
                self._log,
                self._limits,
            ).run()
        except Exception as raised:
            error: BaseException = raised
            # The task group of the lines raises its errors as a group.
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, StoreError):
                self._log("batch_waits", f"{batch.id} waits: {error}", "warning", batch=batch.id)
            else:
                self._log_mistake(error, f"{batch.id} ran")
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self.wake()

    async def _stop(self, owner: str) -> None:
        """Waits until the task has saved the results of its lines."""
        task = self._running[owner].task
        task.cancel()
        await asyncio.wait([task])
        del self._running[owner]

    def _limits(self) -> LineLimits:
        """The limits of one running batch: an equal part of the limits of all."""
        num_batches = max(1, len(self._running))
        return LineLimits(max(1, self._max_lines // num_batches), _MAX_BYTES // num_batches)

    def _has_key(self, owner: str) -> bool:
        """Whether the key of a batch is still configured. Without it, no client could read the results."""
        has_key = owner in self._keys or not owner
        if not has_key and owner not in self._without_key:
            self._without_key.add(owner)
            message = f"Batches of the key {owner!r} wait: it is not among the keys of this server."
            self._log("batches_wait", message, "warning", key=owner)
        return has_key

    async def _sweep(self, now: float) -> None:
        await self._store.run(lambda connection: rows.forget(connection, now - _KEPT_SECONDS))
        while await self._store.run(rows.remove_results):
            pass
        if num_leftovers := await self._services.files.sweep():
            message = f"{num_leftovers} files that were not complete when a server ended are removed."
            self._log("files_removed", message, files=num_leftovers)
