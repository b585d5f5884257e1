"""The table of what engines learned. A row that is damaged is set aside: it gets the kind `damaged`.

All functions run in the thread of the store, inside one transaction.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite3 import Connection

COSTS, DRAFTS, DAMAGED = "costs", "drafts", "damaged"
_DAYS = 90.0
"""A row that was not written for this many days is deleted: its model or its machine is no longer used."""
_MAX_ROWS = 256
"""Maximum rows of one kind. The rows that were not written for the longest time are deleted first."""
_VERSION = 1
"""The version of the content. Rows with another version are set aside, and their content is learned again."""


@dataclass(frozen=True)
class LearnedRow:
    id: str
    name: str
    created_at: float
    updated_at: float
    content: bytes


def put(
    connection: Connection,
    kind: str,
    name: str,
    content: bytes,
    now: float,
    owner: str = "",
    days: float = _DAYS,
) -> None:
    """Adds a row, or replaces its content."""
    connection.execute(
        "INSERT INTO learned (id, kind, name, owner, created_at, updated_at, expires_at, version, checksum, content) "
        "VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO UPDATE SET updated_at = ?5, "
        "expires_at = ?6, version = ?7, checksum = ?8, content = ?9",
        (
            *(f"{kind}:{owner}:{name}", kind, name, owner, now, now + days * 86_400),
            *(_VERSION, zlib.crc32(content), content),
        ),
    )


def drop_rows(connection: Connection, kind: str) -> None:
    """Deletes the oldest rows of a kind if it has too many."""
    connection.execute(
        "DELETE FROM learned WHERE id IN (SELECT id FROM learned WHERE kind = ? ORDER BY updated_at DESC LIMIT -1 OFFSET ?)",
        (kind, _MAX_ROWS),
    )


def drop_bytes(connection: Connection, kind: str, max_bytes: int) -> None:
    """Deletes the oldest rows of a kind if their contents have more bytes than allowed."""
    connection.execute(
        "DELETE FROM learned WHERE id IN (SELECT id FROM (SELECT id, sum(length(content)) OVER "
        "(ORDER BY updated_at DESC, id) AS total FROM learned WHERE kind = ?) WHERE total > ?)",
        (kind, max_bytes),
    )


def sizes(connection: Connection, kind: str, now: float) -> list[tuple[str, int, int, float, float]]:
    """For each owner of rows of a kind: its name, rows, bytes, and the first and the last time of a row."""
    return connection.execute(
        "SELECT owner, count(*), sum(length(content)), min(created_at), max(updated_at) FROM learned "
        "WHERE kind = ? AND expires_at > ? GROUP BY owner ORDER BY owner",
        (kind, now),
    ).fetchall()


def read(connection: Connection, kind: str, now: float) -> tuple[list[LearnedRow], list[str]]:
    """The rows of a kind, and the ids of those that are damaged or have another version."""
    rows, damaged = [], []
    for version, checksum, *fields in connection.execute(
        "SELECT version, checksum, id, name, created_at, updated_at, content FROM learned "
        "WHERE kind = ? AND expires_at > ? ORDER BY updated_at DESC",
        (kind, now),
    ):
        row = LearnedRow(*fields)
        is_whole = isinstance(row.content, bytes) and checksum == zlib.crc32(row.content)
        if is_whole and version == _VERSION:
            rows.append(row)
        else:
            damaged.append(row.id)
    return rows, damaged


def set_aside(connection: Connection, row_id: str) -> None:
    """Gives a damaged row the kind `damaged`, so that an operator can look at it until it expires."""
    connection.execute("DELETE FROM learned WHERE id = ?", (f"{DAMAGED}:{row_id}",))
    connection.execute(
        "UPDATE learned SET kind = ?, id = ? WHERE id = ?", (DAMAGED, f"{DAMAGED}:{row_id}", row_id)
    )


def clear(connection: Connection) -> int:
    """Deletes all rows, damaged ones too. Returns how many."""
    return connection.execute("DELETE FROM learned").rowcount
