"""The rows of vector stores, of their files, and of file batches.

A store that is deleted or expired exists for no client. Its rows are removed in pieces (`passages.py`). A change of what
search may find increases the revision of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weft.memory.documents import ChunkSize
from weft.server.state.paging import PageQuery, read_page

if TYPE_CHECKING:
    from sqlite3 import Connection

FileStatus = Literal["in_progress", "completed", "failed", "cancelled"]
FILE_STATUSES: tuple[FileStatus, ...] = ("in_progress", "completed", "failed", "cancelled")
_STORE = "number, id, owner, created_at, expires_at, last_active_at, name, model, dimensions, revision, index_file, details"
_FILE = "number, store, id, name, created_at, status, batch_id, num_bytes, details"
_ALIVE = "is_deleted = 0 AND (expires_at IS NULL OR expires_at > ?)"
_DAY = 86400.0
_ACTIVE_SECONDS = 60.0
"""Reads update the time of the last activity at most this often: each update is a write."""


class StoreDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    metadata: dict[str, str] = {}
    expires_days: int | None = None
    """The store expires this many days after its last use. None: it never expires."""
    chunk_size: ChunkSize | None = None
    """The size of passages of files that are attached without a size."""


class VectorStore(msgspec.Struct, frozen=True):
    """A row of the table `vector_stores`."""

    number: int
    id: str
    owner: str
    created_at: float
    expires_at: float | None
    last_active_at: float
    name: str
    model: str
    """The name of the model that made the vectors."""
    dimensions: int
    revision: int
    index_file: str | None
    details: StoreDetails


class FileError(msgspec.Struct, frozen=True):
    code: str
    message: str


class FileDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    attributes: dict[str, str | float | bool] = {}
    chunk_size: ChunkSize | None = None
    error: FileError | None = None
    num_passages: int = 0


class AttachedFile(msgspec.Struct, frozen=True):
    """A row of the table `vector_store_files`: a file in a vector store."""

    number: int
    store: int
    id: str
    name: str
    created_at: float
    status: FileStatus
    batch_id: str | None
    num_bytes: int
    """The size of the passages and vectors of the file."""
    details: FileDetails


class FileBatch(msgspec.Struct, frozen=True):
    """A row of the table `vector_store_batches`: files that were attached by one request."""

    id: str
    store: int
    created_at: float
    is_cancelled: bool


class FileCounts(msgspec.Struct, frozen=True):
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    num_bytes: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.failed + self.cancelled


# ---------------------------------------------------------------------- stores


def add(
    connection: Connection,
    store_id: str,
    owner: str,
    now: float,
    name: str,
    model: str,
    dimensions: int,
    details: StoreDetails,
) -> VectorStore:
    cursor = connection.execute(
        "INSERT INTO vector_stores (id, owner, created_at, expires_at, last_active_at, name, model, dimensions, details)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(store_id, owner, now, _expiry(details, now), now, name, model, dimensions),
            msgspec.json.encode(details),
        ),
    )
    connection.execute(
        f"CREATE VIRTUAL TABLE words_{cursor.lastrowid} USING fts5"
        " (text, content='', tokenize='porter unicode61 remove_diacritics 2')"
    )
    found = find(connection, store_id, owner, now)
    assert found is not None
    return found


def find(connection: Connection, store_id: str, owner: str, now: float) -> VectorStore | None:
    query = f"SELECT {_STORE} FROM vector_stores WHERE id = ? AND owner = ? AND {_ALIVE}"
    row = connection.execute(query, (store_id, owner, now)).fetchone()
    return None if row is None else _store(*row)


def by_number(connection: Connection, number: int, now: float) -> VectorStore | None:
    query = f"SELECT {_STORE} FROM vector_stores WHERE number = ? AND {_ALIVE}"
    row = connection.execute(query, (number, now)).fetchone()
    return None if row is None else _store(*row)


def read_stores(
    connection: Connection, owner: str, query: PageQuery, now: float
) -> tuple[list[VectorStore], bool] | None:
    return read_page(
        connection,
        query,
        f"SELECT {_STORE} FROM vector_stores",
        f"owner = ? AND {_ALIVE}",
        (owner, now),
        _store,
    )


def count_stores(connection: Connection, owner: str, now: float) -> int:
    query = f"SELECT COUNT(*) FROM vector_stores WHERE owner = ? AND {_ALIVE}"
    [count] = connection.execute(query, (owner, now)).fetchone()
    return int(count)


def change(connection: Connection, store: VectorStore, now: float, name: str, details: StoreDetails) -> None:
    connection.execute(
        "UPDATE vector_stores SET name = ?, details = ?, last_active_at = ?, expires_at = ? WHERE number = ?",
        (name, msgspec.json.encode(details), now, _expiry(details, now), store.number),
    )


def touch(connection: Connection, store: VectorStore, now: float) -> None:
    """Records that the store was used, so that its lifetime begins again."""
    if abs(now - store.last_active_at) >= _ACTIVE_SECONDS:  # abs: an operator may set the clock back
        connection.execute(
            "UPDATE vector_stores SET last_active_at = ?, expires_at = ? WHERE number = ?",
            (now, _expiry(store.details, now), store.number),
        )


def delete(connection: Connection, store: VectorStore) -> None:
    """Hides the store from clients. `passages.remove_leftovers` removes its rows later."""
    connection.execute("DELETE FROM vector_store_files WHERE store = ?", (store.number,))
    connection.execute("UPDATE vector_stores SET is_deleted = 1 WHERE number = ?", (store.number,))


def set_index_file(connection: Connection, number: int, name: str | None) -> None:
    connection.execute("UPDATE vector_stores SET index_file = ? WHERE number = ?", (name, number))


def index_files(connection: Connection) -> set[str]:
    """The index files of all stores."""
    query = "SELECT index_file FROM vector_stores WHERE index_file IS NOT NULL AND is_deleted = 0"
    return {name for (name,) in connection.execute(query)}


def count_files(connection: Connection, store: int, batch_id: str | None = None) -> FileCounts:
    where, values = ("store = ?", [store]) if batch_id is None else ("batch_id = ?", [batch_id])
    query = f"SELECT status, COUNT(*), SUM(num_bytes) FROM vector_store_files WHERE {where} GROUP BY status"
    rows = connection.execute(query, values).fetchall()
    return FileCounts(**{status: count for status, count, _ in rows}, num_bytes=sum(one[2] for one in rows))


# ---------------------------------------------------------------------- files


def attach(
    connection: Connection,
    store: VectorStore,
    files: Iterable[tuple[str, str, FileDetails]],
    now: float,
    batch_id: str | None = None,
) -> None:
    """Adds rows for files: id, name, details. A file that is attached already is read again, under a new number: its old
    passages are no longer visible."""
    for file_id, name, details in files:
        connection.execute(
            "DELETE FROM vector_store_files WHERE store = ? AND id = ?", (store.number, file_id)
        )
        connection.execute(
            "INSERT INTO vector_store_files (store, id, name, created_at, status, batch_id, details)"
            " VALUES (?, ?, ?, ?, 'in_progress', ?, ?)",
            (store.number, file_id, name, now, batch_id, msgspec.json.encode(details)),
        )
    _revise(connection, store.number)


def find_file(connection: Connection, store: int, file_id: str) -> AttachedFile | None:
    query = f"SELECT {_FILE} FROM vector_store_files WHERE store = ? AND id = ?"
    row = connection.execute(query, (store, file_id)).fetchone()
    return None if row is None else _file(*row)


def file_by_number(connection: Connection, number: int) -> AttachedFile | None:
    row = connection.execute(f"SELECT {_FILE} FROM vector_store_files WHERE number = ?", (number,)).fetchone()
    return None if row is None else _file(*row)


def read_files(
    connection: Connection,
    store: int,
    query: PageQuery,
    status: str | None = None,
    batch_id: str | None = None,
) -> tuple[list[AttachedFile], bool] | None:
    where, values = "store = ?", [store]
    for column, value in (("status", status), ("batch_id", batch_id)):
        if value is not None:
            where, values = f"{where} AND {column} = ?", [*values, value]  # type: ignore[list-item]
    return read_page(connection, query, f"SELECT {_FILE} FROM vector_store_files", where, values, _file)


def completed_files(connection: Connection, store: int) -> list[AttachedFile]:
    query = f"SELECT {_FILE} FROM vector_store_files WHERE store = ? AND status = 'completed'"
    return [_file(*row) for row in connection.execute(query, (store,))]


def completed_numbers(connection: Connection, store: int) -> set[int]:
    query = "SELECT number FROM vector_store_files WHERE store = ? AND status = 'completed'"
    return {number for (number,) in connection.execute(query, (store,))}


def set_attributes(connection: Connection, file: AttachedFile, attributes: dict[str, Any]) -> None:
    details = msgspec.structs.replace(file.details, attributes=attributes)
    connection.execute(
        "UPDATE vector_store_files SET details = ? WHERE number = ?",
        (msgspec.json.encode(details), file.number),
    )


def detach(connection: Connection, file: AttachedFile) -> None:
    connection.execute("DELETE FROM vector_store_files WHERE number = ?", (file.number,))
    _revise(connection, file.store)


def detach_everywhere(connection: Connection, file_ids: Sequence[str]) -> None:
    """Removes deleted files from all stores."""
    for file_id in file_ids:
        query = "SELECT store FROM vector_store_files WHERE id = ?"
        for (store,) in connection.execute(query, (file_id,)).fetchall():
            _revise(connection, store)
        connection.execute("DELETE FROM vector_store_files WHERE id = ?", (file_id,))


def next_files(connection: Connection, now: float) -> list[tuple[str, AttachedFile]]:
    """The oldest file of each owner that is not read yet."""
    # With MIN, SQLite takes the values of all other columns from the row that has the minimum.
    query = (
        f"SELECT s.owner, {', '.join(f'f.{name}' for name in _FILE.split(', '))}, MIN(f.number)"
        " FROM vector_store_files f JOIN vector_stores s ON s.number = f.store"
        f" WHERE f.status = 'in_progress' AND {_ALIVE} GROUP BY s.owner"
    )
    return [(owner, _file(*row[:-1])) for owner, *row in connection.execute(query, (now,))]


def finish(
    connection: Connection,
    number: int,
    status: FileStatus,
    *,
    num_bytes: int = 0,
    num_passages: int = 0,
    error: FileError | None = None,
) -> bool:
    """Sets the final status of a file that is in progress. Returns False if it was removed or cancelled before."""
    file = file_by_number(connection, number)
    if file is None or file.status != "in_progress":
        return False
    details = msgspec.structs.replace(file.details, num_passages=num_passages, error=error)
    connection.execute(
        "UPDATE vector_store_files SET status = ?, num_bytes = ?, details = ? WHERE number = ?",
        (status, num_bytes, msgspec.json.encode(details), number),
    )
    if status == "completed":
        _revise(connection, file.store)
    return True


# ---------------------------------------------------------------------- batches


def add_batch(connection: Connection, store: VectorStore, batch_id: str, now: float) -> None:
    connection.execute(
        "INSERT INTO vector_store_batches (id, store, created_at) VALUES (?, ?, ?)",
        (batch_id, store.number, now),
    )


def find_batch(connection: Connection, store: int, batch_id: str) -> FileBatch | None:
    query = "SELECT id, store, created_at, is_cancelled FROM vector_store_batches WHERE id = ? AND store = ?"
    row = connection.execute(query, (batch_id, store)).fetchone()
    if row is None:
        return None
    found_id, number, created_at, is_cancelled = row
    return FileBatch(found_id, number, created_at, bool(is_cancelled))


def cancel_batch(connection: Connection, batch: FileBatch) -> None:
    """Cancels the files that are still in progress. Completed files stay."""
    connection.execute("UPDATE vector_store_batches SET is_cancelled = 1 WHERE id = ?", (batch.id,))
    connection.execute(
        "UPDATE vector_store_files SET status = 'cancelled' WHERE batch_id = ? AND status = 'in_progress'",
        (batch.id,),
    )


def _revise(connection: Connection, store: int) -> None:
    """Increases the revision of a store, so that its index in memory is updated before the next search."""
    connection.execute("UPDATE vector_stores SET revision = revision + 1 WHERE number = ?", (store,))


def _expiry(details: StoreDetails, now: float) -> float | None:
    return None if details.expires_days is None else now + details.expires_days * _DAY


def _store(*row: Any) -> VectorStore:
    return VectorStore(*(*row[:-1], msgspec.json.decode(row[-1], type=StoreDetails)))


def _file(*row: Any) -> AttachedFile:
    return AttachedFile(*(*row[:-1], msgspec.json.decode(row[-1], type=FileDetails)))
