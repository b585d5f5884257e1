"""The rows of batches: their status, their counts, and the results of their lines.

A change of the status checks the status before it, in the same transaction. The result of a line and the counts change
in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from weft.server.state.files import UNFINISHED
from weft.server.state.paging import PageQuery, read_page

if TYPE_CHECKING:
    from sqlite3 import Connection

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
STATUSES: tuple[Status, ...] = get_args(Status)
_CHUNK = 5000
"""Maximum rows that one transaction removes."""
_PAGE_BYTES = 1 << 20
_COLUMNS = "id, owner, created_at, expires_at, status, input_file_id, total, completed, failed, result_bytes, details"


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a line of the input file, or with the whole file."""

    code: str
    message: str
    line: int | None = None
    """Line number, from 1. None: the error concerns the whole file."""
    param: str | None = None


class BatchDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a batch that are stored as one JSON column, because no query selects by them."""

    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """Seconds until the output files expire, from the time they are made."""
    errors: list[LineError] = []
    """Errors of the first invalid lines of the input file."""
    is_expired: bool = False
    """Whether the completion window has passed. It is set before the unfinished lines get their errors."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    """Status -> Unix time at which the batch got this status."""


class Batch(msgspec.Struct, frozen=True):
    """A row of the table `batches`."""

    id: str
    owner: str
    created_at: float
    expires_at: float
    """The end of the completion window."""
    status: Status
    input_file_id: str
    details: BatchDetails
    total: int = 0
    completed: int = 0
    failed: int = 0
    result_bytes: int = 0
    """Bytes of the results in `batch_lines`."""


class Result(NamedTuple):
    """The result of a line: a line of the output file or of the error file."""

    line: int
    """The index of the line in the input file, from 0. Empty lines count."""
    is_error: bool
    content: bytes


def add(connection: Connection, batch: Batch) -> None:
    connection.execute(
        "INSERT INTO batches (id, owner, created_at, expires_at, status, input_file_id, details)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(batch.id, batch.owner, batch.created_at, batch.expires_at, batch.status, batch.input_file_id),
            msgspec.json.encode(batch.details),
        ),
    )


def find(connection: Connection, batch_id: str, owner: str | None = None) -> Batch | None:
    """The batch with this id, or None. `owner` None: the batch may have any owner."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM batches WHERE id = ?", (batch_id,)).fetchone()
    batch = None if row is None else _batch(*row)
    return batch if batch is not None and owner in (None, batch.owner) else None


def read_batches(connection: Connection, owner: str, query: PageQuery) -> tuple[list[Batch], bool] | None:
    select = f"SELECT {_COLUMNS} FROM batches"
    return read_page(connection, query, select, "owner = ?", (owner,), _batch)


def unfinished(connection: Connection) -> list[Batch]:
    """One batch of each owner: the oldest that has not ended."""
    # With MIN, SQLite takes the values of all other columns from the row that has the minimum.
    query = f"SELECT {_COLUMNS}, MIN(created_at) FROM batches WHERE status IN {UNFINISHED} GROUP BY owner"
    return [_batch(*row[:-1]) for row in connection.execute(query)]


def count_unfinished(connection: Connection, owner: str) -> int:
    query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN {UNFINISHED}"
    [count] = connection.execute(query, (owner,)).fetchone()
    return int(count)


def change(
    connection: Connection,
    batch_id: str,
    before: Sequence[Status],
    status: Status,
    now: float,
    *,
    total: int | None = None,
    **details: Any,
) -> Batch | None:
    """Changes the status, and fields of the details. Changes nothing if the status is not one of `before`. Returns the
    batch as it is afterwards. None: there is no such batch."""
    batch = find(connection, batch_id)
    if batch is None or batch.status not in before:
        return batch
    times = batch.details.times
    if status != batch.status:
        times = {**times, status: int(now)}
    new = msgspec.structs.replace(batch.details, times=times, **details)
    connection.execute(
        "UPDATE batches SET status = ?, details = ?, total = ? WHERE id = ?",
        (status, msgspec.json.encode(new), batch.total if total is None else total, batch_id),
    )
    return find(connection, batch_id)


def add_results(connection: Connection, batch_id: str, results: Iterable[Result]) -> tuple[int, int]:
    """Adds the results of lines, and counts them. A line that has a result keeps it. Returns the numbers of completed
    and of failed lines."""
    counts, num_bytes = [0, 0], 0
    for line, is_error, content in results:
        cursor = connection.execute(
            "INSERT OR IGNORE INTO batch_lines (batch_id, line, is_error, result) VALUES (?, ?, ?, ?)",
            (batch_id, line, is_error, content),
        )
        if cursor.rowcount:
            counts[is_error] += 1
            num_bytes += len(content)
    connection.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, result_bytes = result_bytes + ? WHERE id = ?",
        (*counts, num_bytes, batch_id),
    )
    return counts[0], counts[1]


def lines_with_result(connection: Connection, batch_id: str, first: int, last: int) -> set[int]:
    query = "SELECT line FROM batch_lines WHERE batch_id = ? AND line BETWEEN ? AND ?"
    return {line for (line,) in connection.execute(query, (batch_id, first, last))}


def results_after(connection: Connection, batch_id: str, line: int) -> list[Result]:
    """The next results by line, about a megabyte; at least one if there is any."""
    query = "SELECT line, is_error, result FROM batch_lines WHERE batch_id = ? AND line > ? ORDER BY line"
    results, num_bytes = [], 0
    for number, is_error, content in connection.execute(query, (batch_id, line)):
        results.append(Result(number, bool(is_error), content))
        num_bytes += len(content)
        if num_bytes >= _PAGE_BYTES:
            break
    return results


def remove_results(connection: Connection) -> bool:
    """Removes some results of batches that have ended. Returns whether more may be left."""
    ended = f"SELECT id FROM batches WHERE result_bytes > 0 AND status NOT IN {UNFINISHED} LIMIT 1"
    for (batch_id,) in connection.execute(ended).fetchall():
        removed = connection.execute(
            "DELETE FROM batch_lines WHERE batch_id = ? AND line IN"
            " (SELECT line FROM batch_lines WHERE batch_id = ? ORDER BY line LIMIT ?)",
            (batch_id, batch_id, _CHUNK),
        ).rowcount
        if removed < _CHUNK:
            connection.execute("UPDATE batches SET result_bytes = 0 WHERE id = ?", (batch_id,))
        return True
    return False


def forget(connection: Connection, before: float) -> None:
    """Deletes the rows of batches that were created before this time and have ended."""
    connection.execute(
        f"DELETE FROM batches WHERE created_at < ? AND result_bytes = 0 AND status NOT IN {UNFINISHED}",
        (before,),
    )


def _batch(*row: Any) -> Batch:
    decoded = msgspec.json.decode(row[-1], type=BatchDetails)
    values: list[Any] = [*row[:6], decoded, *row[6:-1]]
    return Batch(*values)
