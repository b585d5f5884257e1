"""The rows of passages: their texts, their vectors, and their words.

A passage is visible while the row of its file is `completed`. Other passages are being added, or are leftovers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.memory.documents import Passage, searched_text
from weft.memory.prompting import Source
from weft.server.state.vector_stores import FileDetails
from weft.vectors import Ids, Vectors, np

if TYPE_CHECKING:
    from sqlite3 import Connection

STORED = "<f2"
"""The numpy type of stored vectors."""
_CHUNK = 2000
"""Passages that one transaction removes."""
_MAX_SQL_VALUES = 500
_VISIBLE = "JOIN vector_store_files f ON f.number = p.file AND f.status = 'completed'"


class Loaded(NamedTuple):
    """The ids of passages, and for each the number of its file."""

    ids: Ids
    files: Ids


def add(connection: Connection, store: int, file: int, passages: Sequence[Passage], vectors: Vectors) -> None:
    """Adds passages. They are not visible until the file is completed."""
    stored = np.ascontiguousarray(vectors, dtype=STORED)
    for passage, vector in zip(passages, stored, strict=True):
        row = (store, file, passage.start, passage.end, passage.page, passage.heading, passage.text)
        passage_id = connection.execute(
            "INSERT INTO passages (store, file, start, end, page, heading, text) VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        ).lastrowid
        connection.execute("INSERT INTO vectors VALUES (?, ?, ?)", (store, passage_id, vector.tobytes()))
        words = (passage_id, passage.searched_text)
        connection.execute(f"INSERT INTO words_{store} (rowid, text) VALUES (?, ?)", words)


def load(connection: Connection, store: int, files: Sequence[int], count: int) -> tuple[Loaded, int]:
    """The passages of the first of these files: of as many as it takes to have `count` passages. Also returns how many
    files these are."""
    rows: list[tuple[int, int]] = []
    num_files = 0
    while num_files < len(files) and len(rows) < count:
        query = "SELECT id, file FROM passages WHERE store = ? AND file = ?"
        rows += connection.execute(query, (store, files[num_files]))
        num_files += 1
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    return Loaded(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])), num_files


def load_vectors(connection: Connection, store: int, ids: Ids, out: Vectors) -> list[int]:
    """Writes the vectors of passages to the rows of `out`. Returns the indices of the passages that were removed."""
    removed = []
    query = "SELECT vector FROM vectors WHERE store = ? AND passage = ?"
    for index, passage_id in enumerate(ids.tolist()):
        row = connection.execute(query, (store, passage_id)).fetchone()
        if row is None:
            removed.append(index)
        else:
            out[index] = np.frombuffer(row[0], STORED)
    return removed


def by_words(
    connection: Connection, store: int, words: str, count: int, files: Sequence[int] | None = None
) -> list[int]:
    """The visible passages with the best BM25 for an FTS5 query, best first. `files`: only passages of these files."""
    among, values = "", list[int]()
    if files is not None:
        if len(files) > _MAX_SQL_VALUES:
            connection.execute("CREATE TEMP TABLE IF NOT EXISTS chosen_files (number INTEGER PRIMARY KEY)")
            connection.execute("DELETE FROM chosen_files")
            connection.executemany("INSERT INTO chosen_files VALUES (?)", ((one,) for one in files))
            among = " AND p.file IN (SELECT number FROM chosen_files)"
        else:
            among, values = f" AND p.file IN ({','.join('?' * len(files))})", list(files)
    query = (
        f"SELECT w.rowid FROM words_{store} w JOIN passages p ON p.id = w.rowid {_VISIBLE}"
        f" WHERE words_{store} MATCH ?{among} ORDER BY w.rank LIMIT ?"
    )
    return [passage_id for (passage_id,) in connection.execute(query, (words, *values, count))]


def sources(connection: Connection, scores: Sequence[tuple[int, float]]) -> list[Source]:
    """The passages with these ids and their scores, in the given order, without those that are no longer visible."""
    found = []
    query = (
        "SELECT f.id, f.name, p.text, p.heading, p.page, p.start, p.end, f.details"
        f" FROM passages p {_VISIBLE} WHERE p.id = ?"
    )
    for passage_id, score in scores:
        row = connection.execute(query, (passage_id,)).fetchone()
        if row is not None:
            file_id, name, text, heading, page, start, end, details = row
            attributes = msgspec.json.decode(details, type=FileDetails).attributes
            found.append(Source(file_id, name, score, text, heading, page, start, end, attributes))
    return found


def texts(
    connection: Connection, file: int, store: int, after: int, max_bytes: int
) -> tuple[list[tuple[int, str]], bool]:
    """Passages of a file, from the first id above `after` on, until they have `max_bytes`; and whether more follow."""
    query = "SELECT id, text FROM passages WHERE store = ? AND file = ? AND id > ? ORDER BY id"
    found: list[tuple[int, str]] = []
    num_bytes = 0
    for passage_id, text in connection.execute(query, (store, file, after)):
        if num_bytes >= max_bytes:
            return found, True
        found.append((passage_id, text))
        num_bytes += len(text.encode())
    return found, False


def remove_unfinished(connection: Connection, store: int, file: int) -> bool:
    """Removes some passages of a file that is ingested again or was removed. Returns whether more may be left."""
    query = "SELECT id FROM passages WHERE store = ? AND file = ? LIMIT ?"
    return _remove(connection, store, [one for (one,) in connection.execute(query, (store, file, _CHUNK))])


def remove_leftovers(connection: Connection, now: float) -> bool:
    """Removes some passages without a file, and stores that were deleted or have expired. Returns whether more may be
    left."""
    gone = "SELECT number FROM vector_stores WHERE is_deleted = 1 OR expires_at <= ? LIMIT 1"
    for (store,) in connection.execute(gone, (now,)).fetchall():
        query = "SELECT id FROM passages WHERE store = ? LIMIT ?"
        ids = [one for (one,) in connection.execute(query, (store, _CHUNK))]
        connection.execute("UPDATE vector_stores SET is_deleted = 1 WHERE number = ?", (store,))
        # The words of the store are removed with their table, so the texts need not be read again.
        connection.executemany(
            "DELETE FROM vectors WHERE store = ? AND passage = ?", ((store, one) for one in ids)
        )
        connection.executemany("DELETE FROM passages WHERE id = ?", ((one,) for one in ids))
        if not ids:
            connection.execute(f"DROP TABLE IF EXISTS words_{store}")
            connection.execute("DELETE FROM vector_stores WHERE number = ?", (store,))
        return True
    for store, file in connection.execute("SELECT store, number FROM removed_documents LIMIT 1").fetchall():
        if not remove_unfinished(connection, store, file):
            connection.execute("DELETE FROM removed_documents WHERE number = ?", (file,))
        return True
    return False


def _remove(connection: Connection, store: int, ids: Sequence[int]) -> bool:
    """Removes passages with their words and vectors. Returns whether there were any."""
    for one in ids:
        heading, text = connection.execute(
            "SELECT heading, text FROM passages WHERE id = ?", (one,)
        ).fetchone()
        # `words_N` is a contentless FTS5 table: a delete must repeat the text that was inserted.
        connection.execute(
            f"INSERT INTO words_{store} (words_{store}, rowid, text) VALUES ('delete', ?, ?)",
            (one, searched_text(heading, text)),
        )
        connection.execute("DELETE FROM vectors WHERE store = ? AND passage = ?", (store, one))
        connection.execute("DELETE FROM passages WHERE id = ?", (one,))
    return bool(ids)
