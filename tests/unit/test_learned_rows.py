"""The table of what was learned: its bound, its age and its sizes."""

from __future__ import annotations

import sqlite3

from weft.server.state import learned as table
from weft.server.state.schema import MIGRATIONS

DAY = 86_400.0


def test_the_oldest_answers_are_deleted_beyond_a_number_of_bytes_and_after_their_days() -> None:
    connection = sqlite3.connect(":memory:")
    for migration in MIGRATIONS:
        for statement in migration:
            connection.execute(statement)
    table.put(connection, table.COSTS, "machine", bytes(50), 0.0)
    for number in range(10):
        owner = "ann" if number < 8 else "bob"
        table.put(connection, table.DRAFTS, f"text {number}", bytes(10), float(number), owner, days=1.0)
    table.put(connection, table.DRAFTS, "text 5", bytes(10), 20.0, "ann", days=1.0)  # the same answer again
    table.drop_bytes(connection, table.DRAFTS, 45)
    rows, damaged = table.read(connection, table.DRAFTS, 30.0)
    assert [row.name for row in rows] == ["text 5", "text 9", "text 8", "text 7"] and not damaged
    assert table.sizes(connection, table.DRAFTS, 30.0) == [
        ("ann", 2, 20, 5.0, 20.0),
        ("bob", 2, 20, 8.0, 9.0),
    ]
    assert [row.name for row in table.read(connection, table.DRAFTS, 10.0 + DAY)[0]] == ["text 5"]
    assert len(table.read(connection, table.COSTS, 30.0)[0]) == 1
    assert table.clear(connection) == 5
