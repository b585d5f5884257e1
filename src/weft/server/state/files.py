"""Files that clients uploaded and that batches wrote: their rows, and one file on disk for each.

A row is written after its file is complete, and deleted before its file is. So a file without a row is a leftover of a
crash; `sweep` removes it. docs/internals/batches.md has every case.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from weft.server.state import vector_stores
from weft.server.state.paging import PageQuery, read_page
from weft.server.state.store import Store, StoreFullError, storage_errors, used_bytes

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")

_PARTIAL = ".new-"
_COLUMNS = "id, owner, created_at, expires_at, name, purpose, num_bytes"
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that still need their input file."""
_USED = f"SELECT input_file_id FROM batches WHERE status IN {UNFINISHED}"


class StoredFile(msgspec.Struct, frozen=True):
    """A row of the table `files`."""

    id: str
    owner: str
    created_at: float
    expires_at: float | None
    name: str
    purpose: str
    num_bytes: int


class NewFile:
    """A file that is being written. It is locked until `close`, so that no server removes it as a leftover. Its methods
    block: call them in a thread. If a task is cancelled, its call goes on in the thread, so a mutex keeps the next call
    from running at the same time."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.id = file_id
        self.num_bytes = 0
        self.is_closed = False
        self._lock = threading.Lock()
        self._folder = folder
        self._partial = folder / f"{_PARTIAL}{file_id}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._descriptor = os.open(self._partial, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Raises StoreFullError if the disk is full."""
        with self._lock, storage_errors(self._folder), memoryview(content) as left:
            while len(left) and not self.is_closed:
                left = left[os.write(self._descriptor, left) :]
        self.num_bytes += len(content)

    def complete(self) -> None:
        """Flushes the content to disk, and then gives the file its final name."""
        with self._lock, storage_errors(self._folder):
            os.fsync(self._descriptor)
            os.rename(self._partial, self._folder / self.id)
            _sync_folder(self._folder)

    def close(self) -> None:
        """Releases the lock. The row must exist: without it, `sweep` removes the file."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                os.close(self._descriptor)

    def discard(self) -> None:
        """Removes the file, unless it was closed."""
        if not self.is_closed:
            for path in (self._partial, self._folder / self.id):
                with suppress(OSError):
                    path.unlink()
            self.close()


class FileStore:
    """Owns the folder of files and their rows."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        self.folder = store.files_folder
        self._store = store
        self._max_bytes = max_bytes
        self._incoming: dict[str, int] = {}
        """Id of a file that is arriving -> the bytes that are reserved for it."""

    def path(self, file_id: str) -> Path:
        return self.folder / file_id

    @asynccontextmanager
    async def incoming(self, file_id: str, num_bytes: int) -> AsyncIterator[NewFile]:
        """A new file. At the end of the `with` block it is discarded, unless it was kept. `num_bytes` bytes of
        the storage limit are reserved for it at once, and more with each `write`. So files that arrive at the same time
        cannot exceed the limit together."""
        file = None
        self._incoming[file_id] = num_bytes
        try:
            file = await self.create(file_id, sum(self._incoming.values()))
            yield file
        finally:
            del self._incoming[file_id]
            if file is not None and not file.is_closed:
                await asyncio.to_thread(file.discard)

    async def write(self, file: NewFile, content: bytearray) -> None:
        """Writes to a file of `incoming`. Raises StoreFullError if there is no space for it."""
        needed = file.num_bytes + len(content)
        if needed > self._incoming[file.id]:
            self._incoming[file.id] = needed
            incoming = sum(self._incoming.values())
            await self._store.run(lambda connection: self.check_space(connection, incoming))
        await asyncio.to_thread(file.write, content)

    async def create(self, file_id: str, num_bytes: int = 0) -> NewFile:
        """Begins a file, if there is space for `num_bytes` bytes. It is created and locked in a transaction. `sweep` of
        another server is a transaction too, so it cannot find the file before it is locked."""

        def create(connection: Connection) -> NewFile:
            self.check_space(connection, num_bytes)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            return NewFile(self.folder, file_id)

        creating = asyncio.ensure_future(self._store.run(create))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The transaction goes on and may still create the file. Nothing would close the file before the server ends.
            await asyncio.wait([creating])
            if creating.exception() is None:
                await asyncio.to_thread(creating.result().discard)
            raise

    def check_space(self, connection: Connection, num_bytes: int) -> None:
        """Raises StoreFullError if the store may not hold `num_bytes` more bytes."""
        stored = used_bytes(connection)
        if stored + num_bytes > self._max_bytes:
            raise StoreFullError(
                f"the server stores {stored} bytes of files, responses and results of batches, and {num_bytes} more do "
                f"not fit; allowed: {self._max_bytes} (max_stored_bytes); delete files that are no longer needed"
            )

    async def keep(self, files: Sequence[tuple[NewFile, StoredFile]], also: Callable[[Connection], T]) -> T:
        """Completes files, and adds their rows in one transaction with `also`. If that fails, the files are discarded. A
        cancel of the caller does not interrupt it: a row without a file must not be left."""
        keeping = asyncio.ensure_future(self._keep(files, also))
        try:
            return await asyncio.shield(keeping)
        except asyncio.CancelledError:
            await asyncio.wait([keeping])
            raise

    async def _keep(self, files: Sequence[tuple[NewFile, StoredFile]], also: Callable[[Connection], T]) -> T:
        """Does the work of `keep`, which shields it from a cancel of the caller."""

        def add(connection: Connection) -> T:
            for _, row in files:
                values = msgspec.structs.astuple(row)
                connection.execute(f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            return also(connection)

        try:
            for file, _ in files:
                await asyncio.to_thread(file.complete)
            result = await self._store.run(add)
        except BaseException:
            for file, _ in files:
                await asyncio.to_thread(file.discard)
            raise
        for file, _ in files:
            file.close()
        return result

    async def find(self, owner: str, file_id: str) -> StoredFile | None:
        now = self._store.wall_clock()
        return await self._store.run(lambda connection: find(connection, owner, file_id, now))

    async def page(
        self, owner: str, purpose: str | None, query: PageQuery
    ) -> tuple[list[StoredFile], bool] | None:
        """The files of a page, and whether more follow. None: there is no file `query.after`."""
        now = self._store.wall_clock()
        where = f"owner = ? AND {_ALIVE}" + ("" if purpose is None else " AND purpose = ?")
        values = [owner, now, *([] if purpose is None else [purpose])]
        select = f"SELECT {_COLUMNS} FROM files"
        return await self._store.run(
            lambda connection: read_page(connection, query, select, where, values, StoredFile)
        )

    async def delete(self, owner: str, file_id: str) -> bool | str:
        """Deletes a file. Returns whether there was one. If a batch still needs it, nothing is deleted, and the id of the
        batch is returned."""
        now = self._store.wall_clock()

        def delete(connection: Connection) -> bool | str:
            if find(connection, owner, file_id, now) is None:
                return False
            query = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {UNFINISHED} LIMIT 1"
            if found := connection.execute(query, (file_id,)).fetchone():
                return str(found[0])
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            vector_stores.detach_everywhere(connection, [file_id])
            return True

        result = await self._store.run(delete)
        if result is True:
            await self._store.run(lambda connection: self.path(file_id).unlink(missing_ok=True))
        return result

    async def sweep(self) -> int:
        """Deletes expired files, and leftovers of a crash. Returns the number of leftovers."""
        now = self._store.wall_clock()

        def expire(connection: Connection) -> None:
            expired = f"expires_at <= ? AND id NOT IN ({_USED})"
            ids = [one for (one,) in connection.execute(f"SELECT id FROM files WHERE {expired}", (now,))]
            vector_stores.detach_everywhere(connection, ids)
            connection.execute(f"DELETE FROM files WHERE {expired}", (now,))

        await self._store.run(expire)
        return await self._store.run(self._remove_leftovers)

    def _remove_leftovers(self, connection: Connection) -> int:
        if not self.folder.is_dir():
            return 0
        known = {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
        leftovers = [one for one in os.scandir(self.folder) if one.name not in known]
        return sum(map(_remove_unless_locked, leftovers))


_ALIVE = "(expires_at IS NULL OR expires_at > ?)"


def find(connection: Connection, owner: str, file_id: str, now: float) -> StoredFile | None:
    query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND {_ALIVE}"
    row = connection.execute(query, (file_id, owner, now)).fetchone()
    return None if row is None else StoredFile(*row)


def _remove_unless_locked(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)
            return True
        finally:
            os.close(descriptor)
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
