"""The tables of kept answers and of feedback about them: their SQL and their limits.

A row of `kept_answers` has the input of one request and its answers. A row of `feedback` belongs to one of these answers,
and is deleted with it. All functions run in the thread of the store, inside one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from weft.server.state.paging import PageQuery, read_page
from weft.server.state.store import StoreFullError, used_bytes

if TYPE_CHECKING:
    from sqlite3 import Connection

_DAY = 86400.0
_EVICTED_AT_ONCE = 16
_ROW_BYTES = 256
"""Estimated bytes of a row besides its texts."""
_PAGE_BYTES = 4 << 20
"""A page ends after this many bytes, or after its first row."""
_COLUMNS = "id, owner, created_at, model, num_answers, input, answers"


@dataclass(frozen=True)
class KeptAnswers:
    """The answers to one request."""

    id: str
    """The id of the request, without the prefix of an API."""
    owner: str
    created_at: float
    model: str
    num_answers: int
    input: bytes
    """JSON: `messages` and `tools` of a conversation, or `prompts`."""
    answers: bytes
    """JSON: a list of messages, or of texts."""

    @property
    def num_bytes(self) -> int:
        return _ROW_BYTES + len(self.input) + len(self.answers)


@dataclass(frozen=True)
class Feedback:
    """What a client says about one answer."""

    answer: int
    """The index of the answer."""
    score: float
    correction: str | None
    """The answer that would have been right."""
    labels: bytes
    """A JSON list of texts."""
    created_at: float

    @property
    def num_bytes(self) -> int:
        return _ROW_BYTES + len((self.correction or "").encode()) + len(self.labels)


@dataclass(frozen=True)
class Room:
    """The limits for kept answers: days and bytes."""

    days: float
    max_bytes: int
    max_stored_bytes: int
    """Limit for all tables and files together."""


@dataclass(frozen=True)
class Totals:
    """Sums over the kept answers of an owner, or of all owners."""

    requests: int = 0
    num_bytes: int = 0
    positive: int = 0
    negative: int = 0
    neutral: int = 0
    corrected: int = 0


_SUMS = ", ".join(f"coalesce(sum({field.name}), 0)" for field in fields(Totals))


def totals(connection: Connection, owner: str | None = None) -> Totals:
    """The totals of an owner. None: of all owners."""
    where, values = ("", ()) if owner is None else ("WHERE owner = ?", (owner,))
    return Totals(*connection.execute(f"SELECT {_SUMS} FROM feedback_totals {where}", values).fetchone())


def insert(connection: Connection, rows: Sequence[KeptAnswers], room: Room) -> int:
    """Adds answers, and deletes older ones to make room. An answer for which there is still no room is left out. Returns
    how many were added."""
    added = 0
    for row in rows:
        if not _make_room(connection, row.num_bytes, room):
            continue
        connection.execute(
            f"INSERT OR IGNORE INTO kept_answers ({_COLUMNS}, expires_at, num_bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*astuple(row), row.created_at + room.days * _DAY, row.num_bytes),
        )
        added += 1
    return added


def num_answers(connection: Connection, request_id: str, owner: str, now: float) -> int:
    """How many answers of this request are kept. 0: it is unknown, has expired, or belongs to another owner."""
    found = connection.execute(
        "SELECT num_answers FROM kept_answers WHERE id = ? AND owner = ? AND expires_at > ?",
        (request_id, owner, now),
    ).fetchone()
    return 0 if found is None else int(found[0])


def give(connection: Connection, request_id: str, owner: str, feedback: Feedback, room: Room) -> None:
    """Adds feedback. It replaces earlier feedback about the same answer."""
    connection.execute("DELETE FROM feedback WHERE id = ? AND answer = ?", (request_id, feedback.answer))
    if not _make_room(connection, feedback.num_bytes, room, spared_id=request_id):
        raise StoreFullError(
            f"the feedback needs {feedback.num_bytes} bytes, and there is no room for it (max_feedback_bytes, "
            "max_stored_bytes); delete older feedback"
        )
    connection.execute(
        "INSERT INTO feedback (id, owner, answer, score, correction, labels, created_at, num_bytes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (request_id, owner, *astuple(feedback), feedback.num_bytes),
    )


def read(
    connection: Connection, owner: str | None, query: PageQuery, now: float
) -> tuple[list[tuple[KeptAnswers, list[Feedback]]], bool] | None:
    """A page of the answers that have feedback, and whether more follow. `owner` None: the answers of all owners. Returns
    None if there is no answer `query.after`."""
    where, values = "expires_at > ?", [now]
    if owner is not None:
        where, values = f"owner = ? AND {where}", [owner, now]  # type: ignore[list-item]
    where += " AND EXISTS (SELECT 1 FROM feedback WHERE feedback.id = kept_answers.id)"
    select = "SELECT id, num_bytes FROM kept_answers"
    found = read_page(connection, query, select, where, values, lambda *row: row)
    if found is None:
        return None
    sizes, has_more = found
    ids: list[str] = []
    num_bytes = 0
    for request_id, size in sizes:
        num_bytes += size
        if ids and num_bytes > _PAGE_BYTES:
            return [_with_feedback(connection, one) for one in ids], True
        ids.append(request_id)
    return [_with_feedback(connection, one) for one in ids], has_more


def _with_feedback(connection: Connection, request_id: str) -> tuple[KeptAnswers, list[Feedback]]:
    row = connection.execute(f"SELECT {_COLUMNS} FROM kept_answers WHERE id = ?", (request_id,)).fetchone()
    given = connection.execute(
        "SELECT answer, score, correction, labels, created_at FROM feedback WHERE id = ? ORDER BY answer",
        (request_id,),
    )
    return KeptAnswers(*row), [Feedback(*one) for one in given]


def delete(connection: Connection, owner: str | None) -> int:
    """Deletes the answers of an owner with their feedback; None: of all owners. Returns the number of requests."""
    where, values = ("", ()) if owner is None else ("WHERE owner = ?", (owner,))
    return connection.execute(f"DELETE FROM kept_answers {where}", values).rowcount


def _make_room(connection: Connection, num_bytes: int, room: Room, spared_id: str = "") -> bool:
    """Deletes answers of the owner with the most bytes, oldest first, until `num_bytes` more fit. Returns
    whether they fit. The answers with the id `spared_id` are never deleted."""
    if num_bytes > room.max_bytes:
        return False
    largest = "SELECT owner FROM feedback_totals WHERE requests > 0 ORDER BY num_bytes DESC LIMIT 1"
    while (
        totals(connection).num_bytes + num_bytes > room.max_bytes
        or used_bytes(connection) + num_bytes > room.max_stored_bytes
    ):
        deleted = connection.execute(
            f"DELETE FROM kept_answers WHERE id IN (SELECT id FROM kept_answers WHERE owner = ({largest}) "
            "AND id != ? ORDER BY created_at LIMIT ?)",
            (spared_id, _EVICTED_AT_ONCE),
        )
        if not deleted.rowcount:
            return False
    return True
