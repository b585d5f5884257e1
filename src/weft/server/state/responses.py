"""The table of stored responses: its SQL and its limits.

A row has the input items of one request and the response to it, both as JSON. `previous_id` links it to the response
before it, so a conversation is a chain of rows. An id is made by the server and a row refers only to an older one, so
there are no cycles.

The state of a background response is the `status` of its row and nothing else. A row that is `queued` or `in_progress`
changes once to a final status; later changes have no effect. So a cancellation and an end at the same time are no
conflict, and any process that has the store may cancel. `worker` names the process that works on the row
(`weft.server.state.process_lock`). When that process has ended, a reader changes the row to `failed`.

All functions that take a connection run in the thread of the store, inside one transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.server.settings import ServerSettings
from weft.server.state.store import StoreFullError, used_bytes

if TYPE_CHECKING:
    from sqlite3 import Connection

MAX_CHAIN = 4096
"""Limit for the responses of one conversation."""
_DAY = 86400.0
_EVICTED_AT_ONCE = 16
_COLUMNS = "id, created_at, previous_id, input, response, status, num_items, worker, request"
_UNFINISHED = "status IN ('queued', 'in_progress')"


@dataclass(frozen=True)
class StoredResponse:
    id: str
    created_at: float
    previous_id: str | None
    input: bytes
    """The items of the request, a JSON list."""
    response: bytes
    """The response object as JSON."""
    status: str
    num_items: int
    """Items of input and output together."""
    worker: str | None = None
    request: bytes | None = None
    """The body of a background request that has not ended."""

    @property
    def is_finished(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response) + len(self.request or b"")


@dataclass(frozen=True)
class Keeping:
    """The limits for stored responses: days and bytes."""

    days: float
    max_bytes: int


def keeping(settings: ServerSettings) -> Keeping:
    return Keeping(settings.response_days, settings.max_stored_bytes)


def insert(connection: Connection, row: StoredResponse, owner: str, now: float, keeping: Keeping) -> None:
    """Adds a response. If the store is full, the oldest responses of the owner with the most bytes are deleted."""
    _make_room(connection, row.num_bytes, keeping.max_bytes)
    connection.execute(
        f"INSERT INTO responses (owner, expires_at, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (owner, now + keeping.days * _DAY, *dataclasses.astuple(row)),
    )


def find(connection: Connection, response_id: str, owner: str, now: float) -> StoredResponse | None:
    """The response with this id. None: it does not exist, has expired, or belongs to another owner."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ? AND expires_at > ?",
        (response_id, owner, now),
    ).fetchone()
    return None if found is None else StoredResponse(*found)


@dataclass(frozen=True)
class Chain:
    """The responses of a conversation, oldest first."""

    rows: list[StoredResponse]
    missing_id: str | None = None
    """The id of the response before these, if there is none with this id: it was deleted, expired or never stored."""
    is_cut: bool = False
    """Older responses exist, but are left out because of the limits."""
    num_items: int = 0
    num_bytes: int = 0
    """If the chain is cut: the items and bytes of these responses and of the first one that is left out. Else 0."""


def chain(
    connection: Connection, last_id: str, owner: str, now: float, *, max_items: int, max_bytes: int
) -> Chain:
    """The conversation that ends with this response."""
    rows: list[StoredResponse] = []
    num_items = num_bytes = 0
    previous: str | None = last_id
    while previous is not None:
        row = find(connection, previous, owner, now)
        if row is None:
            return Chain(rows[::-1], missing_id=previous)
        num_items, num_bytes = num_items + row.num_items, num_bytes + row.num_bytes
        if num_items > max_items or num_bytes > max_bytes or len(rows) == MAX_CHAIN:
            return Chain(rows[::-1], is_cut=True, num_items=num_items, num_bytes=num_bytes)
        rows.append(row)
        previous = row.previous_id
    return Chain(rows[::-1])


def find_all(
    connection: Connection, ids: Iterable[str], owner: str, now: float, *, max_bytes: int
) -> dict[str, StoredResponse]:
    """The responses with these ids, as far as they exist. Stops after `max_bytes`."""
    found: dict[str, StoredResponse] = {}
    for response_id in ids:
        if response_id not in found and (row := find(connection, response_id, owner, now)) is not None:
            found[response_id] = row
            max_bytes -= row.num_bytes
            if max_bytes < 0:
                break
    return found


def change_unfinished(
    connection: Connection,
    response_id: str,
    owner: str,
    status: str,
    response: bytes,
    num_items: int | None = None,
) -> bool:
    """Changes the status and the object of a background response. Returns False if it has a final status, or was
    deleted."""
    changed = connection.execute(
        f"UPDATE responses SET status = ?1, response = ?2, num_items = coalesce(?3, num_items), "
        f"request = iif(?1 = 'in_progress', request, NULL) WHERE id = ?4 AND owner = ?5 AND {_UNFINISHED}",
        (status, response, num_items, response_id, owner),
    )
    return changed.rowcount == 1


def delete(connection: Connection, response_id: str, owner: str) -> None:
    connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))


def _make_room(connection: Connection, num_bytes: int, max_bytes: int) -> None:
    """Deletes responses of the owner with the most bytes, oldest first, until `num_bytes` more fit. So an owner that
    stores very much does not use up the space of the others."""
    largest = (
        f"SELECT owner FROM responses WHERE NOT {_UNFINISHED} GROUP BY owner "
        "ORDER BY sum(length(input) + length(response)) DESC LIMIT 1"
    )
    while used_bytes(connection) + num_bytes > max_bytes:
        deleted = connection.execute(
            f"DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE owner = ({largest}) AND "
            f"NOT {_UNFINISHED} ORDER BY created_at LIMIT {_EVICTED_AT_ONCE})"
        )
        if not deleted.rowcount:
            raise StoreFullError(
                f"the response needs {num_bytes} bytes, but the store has {used_bytes(connection)} of at most "
                f"{max_bytes} bytes (max_stored_bytes), and no older responses are left to delete; delete files, "
                "or send store: false"
            )
