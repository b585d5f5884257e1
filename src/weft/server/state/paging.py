"""Reads the rows of a table page by page, ordered by creation time and id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")


@dataclass(frozen=True)
class PageQuery:
    """Which page: at most `limit` rows that follow the row with the id `after`."""

    limit: int
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def read_page(
    connection: Connection,
    query: PageQuery,
    select: str,
    where: str,
    values: Sequence[object],
    row: Callable[..., T],
) -> tuple[list[T], bool] | None:
    """The rows of a page, and whether more follow. None: there is no row `after`. `select` is a query without WHERE;
    `row` converts the columns of one row."""
    sign = "<" if query.order == "desc" else ">"
    position: Sequence[Any] = ()
    if query.after is not None:
        table = select.rpartition(" ")[2]
        found = connection.execute(
            f"SELECT created_at FROM {table} WHERE {where} AND id = ?", (*values, query.after)
        ).fetchone()
        if found is None:
            return None
        where, position = f"{where} AND (created_at, id) {sign} (?, ?)", (found[0], query.after)
    rows = connection.execute(
        f"{select} WHERE {where} ORDER BY created_at {query.order}, id {query.order} LIMIT ?",
        (*values, *position, query.limit + 1),
    ).fetchall()
    return [row(*one) for one in rows[: query.limit]], len(rows) > query.limit
