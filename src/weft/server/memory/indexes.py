"""Owns the indexes of vector stores in memory, and their files in the folder `indexes` of the store.

An index is derived: it can be made again from the database at any time. docs/internals/memory.md has every case of a crash.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weft.server.state import passages, vector_stores
from weft.server.state.store import Store
from weft.server.state.vector_stores import VectorStore
from weft.vectors import Ids, Vectors, np

# `weft.memory.index_file` and `vector_index` need numpy, so they are imported where they are used.
if TYPE_CHECKING:
    from sqlite3 import Connection

    from weft.memory.vector_index import Base, VectorIndex

_FOLDER = "indexes"
_MAX_BYTES = 512 << 20
"""Maximum memory of all indexes. Beyond it, the least recently used indexes are dropped."""
_DAMAGED = "last.damaged"
"""The name that a damaged index file gets. Only the newest one is kept."""
_PIECE = 2048
"""Passages that one transaction loads. The transaction takes about 20 ms."""
_RETRY_SECONDS = 300.0
"""The pause after a merge that failed. A merge of a large store writes gigabytes."""


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
    merges_from: float = 0.0
    """No merge begins before this monotonic time. A merge that fails sets it."""


class StoreIndexes:
    """Belongs to one event loop."""

    def __init__(self, store: Store, log: Callable[..., object], threads: int | None) -> None:
        self._store = store
        self._folder = store.folder / _FOLDER
        self._log = log
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._num_added: Counter[int] = Counter()
        """Number of a store -> passages that were added since `passages_added` last updated its index."""
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
        self._merge_if_due(one, store)
        return one.index

    async def passages_added(self, number: int, count: int) -> None:
        """Call after a file with `count` passages was added to the store with this number. Updates and merges the index
        after every few thousand passages; otherwise the first search would have to load all vectors."""
        from weft.memory.vector_index import MAX_EXACT

        self._num_added[number] += count
        if self._num_added[number] > MAX_EXACT and self._has_usearch:
            del self._num_added[number]
            now = self._store.wall_clock()
            store = await self._store.run(lambda connection: vector_stores.by_number(connection, number, now))
            if store is not None:
                await self.current(store)

    async def _update(self, one: _Open, store: VectorStore) -> None:
        """Brings an index to the newest revision of its store: opens the base if that is not open, and adds and removes
        passages."""
        if one.revision < 0 and store.index_file is not None:
            base = await self._opened(store.index_file)
            if base is not None:
                one.index, one.base_name = one.index.with_base(base), store.index_file
        known, index = one.files, one.index

        def read(connection: Connection) -> tuple[int, set[int]] | None:
            found = vector_stores.by_number(connection, store.number, 0.0)
            if found is None:
                return None
            return found.revision, vector_stores.completed_numbers(connection, store.number)

        found = await self._store.run(read)
        if found is None:
            return
        revision, files = found
        ids, numbers = await self._loaded(store, sorted(files - known))
        in_base = np.zeros(len(ids), bool)
        if index.base is not None:
            in_base = np.isin(ids, index.base.ids, assume_unique=True)
        is_there, delta = await self._loaded_vectors(store, ids[~in_base])
        delta_ids = ids[~in_base][is_there]
        stays = in_base.copy()
        stays[~in_base] = is_there
        one.index = await asyncio.to_thread(
            index.changed, known - files, ids[stays], numbers[stays], delta_ids, delta
        )
        one.revision, one.files = revision, files

    async def _loaded(self, store: VectorStore, files: list[int]) -> passages.Loaded:
        """The passages of files. Each transaction reads one piece, so that other transactions do not wait for all pieces."""
        none = np.zeros(0, np.int64)
        parts, done = [passages.Loaded(none, none)], 0
        while done < len(files):
            left = files[done:]
            part, num_files = await self._store.run(
                partial(passages.load, store=store.number, files=left, count=_PIECE)
            )
            parts.append(part)
            done += num_files
        return passages.Loaded(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    async def _loaded_vectors(self, store: VectorStore, ids: Ids) -> tuple[Ids, Vectors]:
        """A flag for each passage that says whether it still exists, and the vectors of those that do. A file may be
        removed between two pieces. The next update then removes its other passages."""
        vectors = np.empty((len(ids), store.dimensions), np.float32)
        is_there = np.ones(len(ids), bool)
        for start in range(0, len(ids), _PIECE):
            piece = slice(start, start + _PIECE)
            work = partial(passages.load_vectors, store=store.number, ids=ids[piece], out=vectors[piece])
            removed = await self._store.run(work)
            is_there[[start + index for index in removed]] = False
        return is_there, vectors if is_there.all() else vectors[is_there]

    async def _opened(self, name: str) -> Base | None:
        """The base in this file. None: there is no such file, it is damaged, or usearch is not installed."""
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
                os.replace(path, self._folder / _DAMAGED)
            message = f"The index {path} was damaged. It is made again, and the file is now {_DAMAGED}."
            self._log("damaged_index", message, "warning")
            return None

    def _merge_if_due(self, one: _Open, store: VectorStore) -> None:
        may_merge = self._store.is_primary and self._has_usearch and time.monotonic() >= one.merges_from
        if may_merge and one.merging is None and one.index.must_merge:
            one.merging = asyncio.create_task(self._merge(one, store))

    async def _merge(self, one: _Open, store: VectorStore) -> None:
        """Makes a new base of all passages, in a thread, while searches use the old one."""
        from weft.memory.index_file import NoIndexError, open_graph, write_graph
        from weft.memory.vector_index import base_of, merged

        index, old = one.index, one.base_name

        def build() -> tuple[str, Base]:
            editable = None
            if index.base is not None and old is not None and not index.is_mostly_removed:
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
        except Exception as error:  # such as a full disk, or no memory: searches go on with the old base
            one.merges_from = time.monotonic() + _RETRY_SECONDS
            message = (
                f"The index of {store.id} could not be merged ({type(error).__name__}: {error}); search is slower. "
                f"The next try is in {_RETRY_SECONDS:.0f} s at the earliest."
            )
            self._log("index_not_merged", message, "warning")
        finally:
            one.merging = None
        self._merge_if_due(one, store)  # passages may have been added or removed during the merge

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
                if entry.name not in named and entry.name != _DAMAGED:
                    os.unlink(entry.path)

        # A merge that runs may have written a file that the row does not name yet.
        if self._folder.is_dir() and not any(one.merging for one in self._open.values()):
            await self._store.run(remove)
