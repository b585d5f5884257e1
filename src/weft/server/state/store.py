"""The database of the server. It opens the file, migrates it, runs transactions in one thread, and sets a damaged file aside.

Each kind of row has a module of its own, which has its SQL. Rows belong to an owner, an API key, and may expire.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from weft.errors import WeftError
from weft.server.state.process_lock import ProcessLock
from weft.server.state.schema import EXPIRING, MIGRATIONS

if TYPE_CHECKING:
    from sqlite3 import Connection, DatabaseError

T = TypeVar("T")
LogEvent = Callable[[str, str, str], object]
"""Logs a name, a message, and a level."""

_DATABASE = "state.db"
_FILES = "files"
_LOCK = "lock"
_BUSY_SECONDS = 10.0
"""How long a transaction waits for another process that has locked the database. The time counts from the call of
`run`: it includes the wait for earlier transactions of this process."""
_LEAST_BUSY_SECONDS = 0.05
_EXPIRY_SECONDS = 600.0
_EXPIRED_AT_ONCE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(WeftError):
    """The database cannot be read or written: a full disk, a folder without permission."""


class StoreFullError(StoreError):
    """The disk is full, or a limit of the store is reached."""


class _DamagedError(Exception):
    """The check of the database at its opening has found damage."""


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Converts an OSError of a file in `folder` to a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(_full_message(folder)) from error
        raise StoreError(
            f"{folder}: the server cannot keep its state there: {error.strerror or error}; "
            "set state_path to a writable folder"
        ) from error


class Store:
    """Owns the connection and its thread. Belongs to one event loop.

    The file is opened at the first use, so that a start does not wait for it. Several servers may share a folder: their
    transactions exclude each other. Only one of them is the primary server (`is_primary`); it runs batches.
    """

    def __init__(self, folder: Path, log: LogEvent, wall_clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.files_folder = folder / _FILES
        """The folder of the files whose rows are in the database."""
        self.wall_clock = wall_clock
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-store")
        self._connection: Connection | None = None
        self._lock: IO[str] | None = None
        self._expired_at = -math.inf
        """When expired rows were last deleted."""
        self.process_lock = ProcessLock(folder)
        self.is_primary = False
        """Whether this server has the lock of the folder. The first server takes it; when that ends, another one. False until
        the first transaction."""

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in the thread of the store, in one transaction. The transaction is on disk when this method returns. An
        exception of `work` rolls it back. A cancelled caller does not stop it."""
        give_up_at = time.monotonic() + _BUSY_SECONDS
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work, give_up_at)

    @property
    def exists(self) -> bool:
        """Whether there is a database. False until the first transaction of the first server."""
        return (self.folder / _DATABASE).exists()

    async def close(self) -> None:
        """Waits for the running transactions."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # ------------------------------------------------------------------ in the thread of the store

    def _run(self, work: Callable[[Connection], T], give_up_at: float) -> T:
        """Does the work of `run`: opens the database if it is closed, tries to become the primary server, removes some
        expired rows, then runs the transaction. The removal is not part of it: it may fail, and stays if `work` fails.
        If SQLite finds damage, the database is set aside, and the next call makes an empty one."""
        import sqlite3

        try:
            with storage_errors(self.folder):
                if self._connection is None:
                    self._connection = self._open()
                connection = self._connection
                if not self.is_primary:
                    self._try_lock()
                # The removal of expired rows may fail: the disk is full, or another server has the lock. It is tried again
                # later. The transaction below reports such an error itself.
                with suppress(sqlite3.OperationalError):
                    self._expire(connection)
                busy_seconds = max(_LEAST_BUSY_SECONDS, give_up_at - time.monotonic())
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * busy_seconds)}")
                connection.execute("BEGIN IMMEDIATE")
                try:
                    result = work(connection)
                    connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):  # SQLite itself rolls back when the disk is full
                        connection.execute("ROLLBACK")
                    raise
                return result
        except sqlite3.DatabaseError as error:
            if _is_full(error):
                raise StoreFullError(_full_message(self.folder)) from error
            if _is_damaged(error):
                self._set_aside(str(error))
            raise StoreError(f"{self.folder}: the database of the server failed: {error}") from error

    def _open(self) -> Connection:
        """Opens the database, or makes a new one if it is missing or damaged."""
        import sqlite3

        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / _DATABASE
        _open_private(path).close()
        try:
            return self._connect(path)
        except (sqlite3.DatabaseError, _DamagedError) as error:
            if isinstance(error, sqlite3.DatabaseError) and not _is_damaged(error):
                raise
            self._set_aside(str(error))
            _open_private(path).close()
            return self._connect(path)

    def _connect(self, path: Path) -> Connection:
        import sqlite3

        connection = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            [check] = connection.execute("PRAGMA quick_check(1)").fetchone()
            if check != "ok":
                raise _DamagedError(check)
            _migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _try_lock(self) -> None:
        """Tries to become the primary server. The kernel releases the lock when the primary server ends."""
        if self._lock is None:
            self._lock = _open_private(self.folder / _LOCK)
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_primary = True

    def _expire(self, connection: Connection) -> None:
        """Deletes some expired rows, if that was not done lately."""
        now = self.wall_clock()
        if abs(now - self._expired_at) < _EXPIRY_SECONDS:  # abs: an operator may set the clock back
            return
        self._expired_at = now
        for table in EXPIRING:
            expired = f"SELECT id FROM {table} WHERE expires_at <= ? LIMIT {_EXPIRED_AT_ONCE}"
            if connection.execute(f"DELETE FROM {table} WHERE id IN ({expired})", (now,)).rowcount:
                self._expired_at = -math.inf  # more rows may be expired: continue in the next transaction

    def _set_aside(self, reason: str) -> None:
        """Renames a damaged database, and the folder of files: without their rows they would count as leftovers of a
        crash. The next transaction begins with an empty database."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        aside = self.folder / f"{_DATABASE}.damaged-{int(self.wall_clock())}"
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{self.folder / _DATABASE}{suffix}", f"{aside}{suffix}")
        with suppress(OSError):
            os.rename(self.files_folder, aside.with_name(aside.name.replace(_DATABASE, _FILES)))
        message = (
            f"The database of the server was damaged ({reason}). It is now {aside}, and a new one is in use."
        )
        self._log("damaged_state", message, "warning")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.process_lock.close()


def used_bytes(connection: Connection) -> int:
    """The size of the rows of all tables, and of the files beside the database."""
    sizes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
    pages, free = sizes
    [page_size] = connection.execute("PRAGMA page_size").fetchone()
    [files] = connection.execute("SELECT coalesce(sum(num_bytes), 0) FROM files").fetchone()
    return int((pages - free) * page_size + files)


def _is_damaged(error: DatabaseError) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _is_full(error: DatabaseError) -> bool:
    """Whether the disk is full. SQLite reports some causes, such as a limit on the size of files, as an I/O error."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE"))


def _full_message(folder: Path) -> str:
    return f"{folder}: the disk is full; free some space, or set state_path to another folder"


def _open_private(path: Path) -> IO[str]:
    """Opens a file to read and write, and makes it if it does not exist. Only its owner can read it."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")


def _migrate(connection: Connection) -> None:
    """Brings the tables to the newest version: one transaction for each missing entry of `MIGRATIONS`."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the database of the server has version {version}; this version of weft reads up to {len(MIGRATIONS)}; "
            "use a newer weft, or set state_path to another folder"
        )
    for number, statements in enumerate(MIGRATIONS[version:], version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
