"""Owns the indexes of vector stores in memory, and their files in the folder `indexes` of the store.

An index is derived: it can be made again from the rows at any time. docs/internals/memory.md has every case of a crash.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.server.state import passages, vector_stores
from weft.server.state.store import Store, StoreError
from weft.server.state.vector_stores import VectorStore
from weft.vectors import np

# `weft.memory.index_file` and `vector_index` need numpy, so they are imported where they are used.
if TYPE_CHECKING:
    from sqlite3 import Connection

    from weft.memory.vector_index import Base, VectorIndex

_FOLDER = "indexes"
_MAX_BYTES = 512 << 20
"""Memory for indexes. Beyond it, those that were not used for the longest time are dropped."""
_DAMAGED = ".damaged"


@dataclass
class _Open:
    """The index of one store."""

    index: VectorIndex
    revision: int = -1
    files: set[int] = field(default_factory=set)
    """Numbers of the files whose passages are in the index."""
    base_name: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A task holds this lock while it changes the index."""
    merging: asyncio.Task[None] | None = None


class StoreIndexes:
    """Belongs to one event loop."""

    def __init__(self, store: Store, log: Callable[..., object], threads: int | None) -> None:
        self._store = store
        self._folder = store.folder / _FOLDER
        self._log = log
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._has_usearch = True

    async def close(self) -> None:
        merging = [one.merging for one in self._open.values() if one.merging is not None]
        for task in merging:
            task.cancel()
        await asyncio.gather(*merging, return_exceptions=True)

    async def current(self, store: VectorStore) -> VectorIndex:
        """The index with all passages that were visible when `store` was read, or later."""
        from weft.memory.vector_index import VectorIndex

        one = self._open.get(store.id)
        if one is None:
            one = self._open[store.id] = _Open(VectorIndex.empty(store.dimensions))
        self._open.move_to_end(store.id)
        if one.revision < store.revision:
            async with one.lock:
                await self._update(one, store)
        self._drop_unused()
        if one.index.must_merge and one.merging is None and self._store.is_primary and self._has_usearch:
            one.merging = asyncio.create_task(self._merge(one, store))
        return one.index

    async def _update(self, one: _Open, store: VectorStore) -> None:
        if one.revision < 0 and store.index_file is not None:
            base = await self._opened(store.index_file)
            if base is not None:
                one.index, one.base_name = one.index.with_base(base), store.index_file
        known, index = one.files, one.index

        def read(connection: Connection) -> tuple[int, set[int], VectorIndex] | None:
            found = vector_stores.by_number(connection, store.number, 0.0)
            if found is None:
                return None
            files = vector_stores.completed_numbers(connection, store.number)
            added = sorted(files - known)
            ids, numbers = passages.load(connection, store.number, added if known else None)
            in_base = np.zeros(len(ids), bool)
            if index.base is not None:
                in_base = np.isin(ids, index.base.ids, assume_unique=True)
            delta_ids = ids[~in_base]
            delta = passages.load_vectors(connection, store.number, delta_ids, store.dimensions)
            return found.revision, files, index.changed(known - files, ids, numbers, delta_ids, delta)

        updated = await self._store.run(read)
        if updated is not None:
            one.revision, one.files, one.index = updated

    async def _opened(self, name: str) -> Base | None:
        from weft.memory.index_file import DamagedIndexError, NoIndexError, open_graph
        from weft.memory.vector_index import base_of

        try:
            return await asyncio.to_thread(lambda: base_of(open_graph(self._folder, name)))
        except FileNotFoundError:
            return None
        except NoIndexError:
            self._report_no_usearch()
            return None
        except (DamagedIndexError, ValueError, RuntimeError):
            # Not an error for the client: the vectors are in the database.
            path = self._folder / name
            with suppress(OSError):
                os.replace(path, path.with_name(name + _DAMAGED))
            message = f"The index {path} was damaged. It is set aside and made again."
            self._log("damaged_index", message, "warning")
            return None

    async def _merge(self, one: _Open, store: VectorStore) -> None:
        """Makes a new base of all passages, in a thread, while searches use the old one."""
        from weft.memory.index_file import DamagedIndexError, NoIndexError, open_graph, write_graph
        from weft.memory.vector_index import base_of, merged

        index, old = one.index, one.base_name

        def build() -> tuple[str, Base]:
            editable = None
            if index.base is not None and old is not None:
                editable = open_graph(self._folder, old, is_mapped=False)
            graph = merged(index, self._threads, editable)
            name = write_graph(graph, self._folder, store.id)
            return name, base_of(open_graph(self._folder, name))

        try:
            name, base = await asyncio.to_thread(build)
            await self._store.run(
                lambda connection: vector_stores.set_index_file(connection, store.number, name)
            )
            async with one.lock:
                one.index, one.base_name = one.index.with_base(base), name
            if old is not None and old != name:
                await asyncio.to_thread((self._folder / old).unlink, missing_ok=True)
        except NoIndexError:
            self._report_no_usearch()
        except (
            OSError,
            StoreError,
            DamagedIndexError,
            FileNotFoundError,
            MemoryError,
            RuntimeError,
        ) as error:
            message = f"The index of {store.id} could not be merged ({type(error).__name__}: {error}); search is slower."
            self._log("index_not_merged", message, "warning")
        finally:
            one.merging = None

    def _report_no_usearch(self) -> None:
        if self._has_usearch:
            self._has_usearch = False
            message = "Large vector stores are searched without an index, which is slow: install weft[memory] (usearch)."
            self._log("no_usearch", message, "warning")

    def _drop_unused(self) -> None:
        num_bytes = sum(one.index.num_bytes for one in self._open.values())
        for store_id, one in list(self._open.items())[:-1]:
            if num_bytes <= _MAX_BYTES:
                return
            if one.merging is None and not one.lock.locked():
                num_bytes -= one.index.num_bytes
                del self._open[store_id]

    async def remove_leftovers(self) -> None:
        """Removes index files that no store names. Only the primary server may call it."""

        def remove(connection: Connection) -> None:
            named = vector_stores.index_files(connection)
            for entry in os.scandir(self._folder):
                if entry.name not in named and not entry.name.endswith(_DAMAGED):
                    os.unlink(entry.path)

        # A merge writes a file before the row names it.
        if self._folder.is_dir() and not any(one.merging for one in self._open.values()):
            await self._store.run(remove)
