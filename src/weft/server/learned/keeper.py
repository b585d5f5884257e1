"""Keeps what the engine of MODEL learned: reads it before the first request, and writes it regularly.

The costs of steps are kept for each model and machine (`name_of`). After a crash, the new engine process gets the newest
known costs. An error of the store never fails a start or a request: without the store, an engine learns anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from weft import __version__
from weft.engine.ipc.client import EngineClient
from weft.errors import WeftError
from weft.learned_costs import LearnedCosts, LearnedText
from weft.plan import BackendInfo
from weft.server.learned.texts import AnswerTexts
from weft.server.settings import ServerSettings
from weft.server.state import learned as table
from weft.server.state.learned import LearnedRow
from weft.server.state.store import Store, StoreError

_READ_SECONDS = 1.0
"""A start waits for the store at most this long."""
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
"""Seconds until the first writing. The pause doubles up to the second number: most is learned in the beginning."""
_LEAST_STEPS = 3


class LearnedKeeper:
    """Belongs to one event loop."""

    def __init__(
        self, settings: ServerSettings, store: Store, engine: EngineClient, log: Callable[..., object]
    ) -> None:
        self._settings = settings
        self.store = store
        self._engine = engine
        self._log = log
        self._texts: AnswerTexts | None = None
        if settings.learned_text_days and settings.engine.scheduler.max_learned_bytes:
            self._texts = AnswerTexts(settings, store, engine, self._set_aside)
        self._costs: dict[str, LearnedCosts] = {}
        """The newest known costs, by model and machine."""
        self._has_begun = self._has_failed = False
        self._kept: list[tuple[str, LearnedText]] = []
        """The kept answers with the names of their models, until the engine gets them."""
        self._reading: asyncio.Task[None] | None = None
        engine.costs_for = self._costs_for

    def note_owner(self, cache_salt: str, owner: str) -> None:
        """Notes whose answers have a cache salt."""
        if self._texts is not None:
            self._texts.note_owner(cache_salt, owner)

    def _costs_for(self, info: BackendInfo) -> LearnedCosts | None:
        if self._has_begun and self._texts is not None:  # the engine was restarted
            self._reading = asyncio.create_task(self._restore_texts(info))
        return self._costs.get(name_of(self._settings, info))

    def start_reading(self) -> None:
        """Begins to read the kept costs while the engine starts."""
        if self.store.exists:  # otherwise reading would make a database for a server that keeps nothing
            self._reading = asyncio.create_task(self._read())

    async def begin(self) -> None:
        """Passes the kept costs to the engine, which must be ready. Called before the first request."""
        self._has_begun = True
        if self._texts is not None:
            with suppress(WeftError):
                await self._engine.new_answers()  # from now on the engine collects them
        if self._reading is None:
            return
        await asyncio.wait((self._reading,), timeout=_READ_SECONDS)
        if not self._reading.done():
            self._log(
                "learned_late", "The store is slow: the engine starts without what it learned.", "warning"
            )
        elif (info := self._engine.info) is not None:
            if (costs := self._costs.get(name_of(self._settings, info))) is not None:
                self._engine.restore_costs(costs)
            if self._texts is not None:
                self._texts.restore(self._kept, info)
        self._kept = []

    async def run(self) -> None:
        """Writes what the engine has learned, until it is cancelled."""
        seconds = _FIRST_SECONDS
        while True:
            await asyncio.sleep(seconds)
            await self.save()
            seconds = min(2 * seconds, _MOST_SECONDS)

    async def save(self) -> None:
        """Writes the costs if they have changed, and new answers. Without effect while the engine is not ready."""
        info = self._engine.info
        if self._texts is not None and info is not None:
            try:
                while texts := await self._engine.new_answers():
                    await self._in_store(self._texts.writer(texts, info))
            except WeftError:
                return
        try:
            costs = await self._engine.learned_costs()
        except WeftError:
            return
        if info is None or costs.steps < _LEAST_STEPS:
            return
        name = name_of(self._settings, info)
        if self._costs.get(name) == costs:
            return
        self._costs[name] = costs
        content, now = msgspec.json.encode(costs), self.store.wall_clock()

        def write(connection: Any) -> None:
            if self.store.is_primary:  # two servers with one folder must not overwrite each other's rows
                table.put(connection, table.COSTS, name, content, now)
                table.drop_rows(connection, table.COSTS)

        await self._in_store(write)

    async def rows(self) -> list[tuple[LearnedRow, LearnedCosts]]:
        """The kept rows with their costs, the newest first. Damaged rows are set aside."""
        now = self.store.wall_clock()

        def read(connection: Any) -> list[tuple[LearnedRow, LearnedCosts]]:
            rows, damaged = table.read(connection, table.COSTS, now)
            good = []
            for row in rows:
                if (costs := _costs_of(row)) is None:
                    damaged.append(row.id)
                else:
                    good.append((row, costs))
            self._set_aside(connection, damaged)
            return good

        return await self.store.run(read)

    async def texts(self) -> list[tuple[str, int, int, float, float]]:
        """The sizes of the kept answers of each owner (`table.sizes`)."""
        now = self.store.wall_clock()
        return await self.store.run(lambda connection: table.sizes(connection, table.DRAFTS, now))

    def _set_aside(self, connection: Any, damaged: list[str]) -> None:
        for row_id in damaged:
            table.set_aside(connection, row_id)
            message = (
                f"{row_id} in the database of the server was damaged. It is set aside, and learned anew."
            )
            self._log("damaged_learned", message, "warning")

    async def clear(self) -> int:
        """Deletes the kept costs and answers, and everything that the engine learned. Returns the number of deleted rows."""
        count: int = await self.store.run(table.clear)
        self._costs.clear()
        self._engine.forget_learned()
        return count

    async def _read(self) -> None:
        try:
            self._costs |= {row.name: costs for row, costs in await self.rows()}
            if self._texts is not None:
                self._kept = await self._texts.read()
        except StoreError as error:
            self._report(error)

    async def _restore_texts(self, info: BackendInfo) -> None:
        """Gives a restarted engine the kept answers."""
        assert self._texts is not None
        try:
            await self._engine.new_answers()
            self._texts.restore(await self._texts.read(), info)
        except StoreError as error:
            self._report(error)
        except WeftError:
            pass  # the engine has ended again

    async def _in_store(self, work: Callable[[Any], None]) -> None:
        try:
            await self.store.run(work)
            self._has_failed = False
        except StoreError as error:
            self._report(error)

    def _report(self, error: StoreError) -> None:
        if not self._has_failed:  # one line for each outage
            self._log("learned_not_kept", f"What the engine learns is not kept: {error}", "warning")
        self._has_failed = True


def name_of(settings: ServerSettings, info: BackendInfo) -> str:
    """A name for the model and the machine that costs belong to. It has the path of the model, its size and its options. So
    another file at the same path may get these costs: they are a hint, and are measured again."""
    machine = info.device or _processor()
    options = {"model": settings.model, **settings.backend_options}
    options.pop("core_lease", None)  # a descriptor of this process
    fields = (
        *(settings.backend, sorted((name, repr(value)) for name, value in options.items())),
        *(info.weight_bytes, info.bytes_per_block, info.block_size, info.store_blocks > 0),
        *(machine, len(os.sched_getaffinity(0)), __version__),
    )
    digest = hashlib.sha256(repr(fields).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{settings.names[0]:.64} on {machine:.64}, {digest}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return "this processor"


def _costs_of(row: LearnedRow) -> LearnedCosts | None:
    """The costs in a row. None: the content is damaged."""
    try:
        return msgspec.json.decode(row.content, type=LearnedCosts)
    except ValueError:  # also the errors of msgspec
        return None
