"""The database of the server: transactions, owners of the lock, damage, a full disk, versions."""

import asyncio
import sqlite3
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from weft.server.state import schema
from weft.server.state import store as store_module
from weft.server.state.store import Store, StoreError, StoreFullError

Work = Callable[[sqlite3.Connection], Any]


class Events:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, message: str, level: str) -> None:
        self.names.append(name)


COLUMNS = "id, owner, created_at, expires_at, previous_id, input, response"


def add(name: str, expires_at: float = 1e12) -> Work:
    row = (name, "", 0.0, expires_at, None, b"[]", b"{}")
    return lambda connection: connection.execute(
        f"INSERT INTO responses ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row
    )


def names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT id FROM responses ORDER BY id")]


def used(
    folder: Path, work: Callable[[Store], Awaitable[Any]], clock: Callable[[], float] = lambda: 1.0
) -> Any:
    """The result of `work` with a store in this folder, and the names of the logged events."""
    events = Events()

    async def run() -> Any:
        store = Store(folder, events, clock)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run()), events.names


def test_rows_stay_after_the_end_of_a_server_and_no_other_user_reads_them(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await store.run(add("a"))

    async def read(store: Store) -> Any:
        return await store.run(names)

    used(tmp_path / "state", write)
    assert used(tmp_path / "state", read) == (["a"], [])
    for path in (tmp_path / "state").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_an_exception_rolls_a_transaction_back(tmp_path: Path) -> None:
    def fails(connection: sqlite3.Connection) -> None:
        add("a")(connection)
        raise KeyError("work failed")

    async def work(store: Store) -> Any:
        with pytest.raises(KeyError):
            await store.run(fails)
        await store.run(add("b"))
        return await store.run(names)

    assert used(tmp_path, work) == (["b"], [])


def test_a_damaged_file_is_set_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await store.run(lambda c: [add(f"{i:05}")(c) for i in range(2000)])
        store.files_folder.mkdir()
        (store.files_folder / "file-a").write_text("content")

    async def use(store: Store) -> Any:
        await store.run(add("new"))
        return await store.run(names)

    for damage in (b"not a database" * 400, None):
        folder = tmp_path / ("header" if damage else "pages")
        used(folder, write)
        path = folder / "state.db"
        content = bytearray(path.read_bytes())
        if damage:
            content[: len(damage)] = damage
        else:
            content[4096:] = b"\x5a" * (len(content) - 4096)
        path.write_bytes(content)
        assert used(folder, use) == (["new"], ["damaged_state"])
        assert len(list(folder.glob("state.db.damaged-*"))) == 1
        # Without their rows, a sweep would delete the files.
        assert [one.name for one in folder.glob("files.damaged-*/*")] == ["file-a"]


def test_a_full_disk_is_an_error_that_names_the_folder_and_loses_no_row(tmp_path: Path) -> None:
    async def work(store: Store) -> Any:
        await store.run(add("a"))
        # SQLite reports a file that may not grow as it reports a full disk.
        [pages] = await store.run(lambda c: c.execute("PRAGMA page_count").fetchone())
        await store.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())
        with pytest.raises(StoreFullError, match=f"{tmp_path}.*disk is full"):
            await store.run(lambda c: [add(f"b{i}" + "x" * 4000)(c) for i in range(50)])
        return await store.run(names)

    assert used(tmp_path, work) == (["a"], [])


def test_only_one_server_of_a_folder_is_primary_and_both_write(tmp_path: Path) -> None:
    async def work(first: Store) -> Any:
        await first.run(add("a"))
        second = Store(tmp_path, Events(), lambda: 1.0)
        try:
            await second.run(add("b"))
            return first.is_primary, second.is_primary, await first.run(names)
        finally:
            await second.close()

    assert used(tmp_path, work)[0] == (True, False, ["a", "b"])


def test_another_server_becomes_primary_when_the_first_one_ends(tmp_path: Path) -> None:
    async def work(second: Store) -> Any:
        first = Store(tmp_path, Events())
        await first.run(names)
        await second.run(names)
        was_primary = second.is_primary
        await first.close()
        await second.run(names)
        return was_primary, second.is_primary

    assert used(tmp_path, work)[0] == (False, True)


def test_expired_rows_are_deleted(tmp_path: Path) -> None:
    now = [1.0]

    async def work(store: Store) -> Any:
        await store.run(add("short", expires_at=500.0))
        await store.run(add("long", expires_at=5000.0))
        now[0] = 1000.0
        return await store.run(names)

    assert used(tmp_path, work, lambda: now[0])[0] == ["long"]


def test_expired_rows_are_deleted_after_the_clock_jumped_forth_and_back(tmp_path: Path) -> None:
    now = [1e9]

    async def work(store: Store) -> Any:
        await store.run(names)
        now[0] = 1000.0
        await store.run(add("short", expires_at=2000.0))
        now[0] = 3000.0
        return await store.run(names)

    assert used(tmp_path, work, lambda: now[0])[0] == []


def test_many_expired_rows_are_deleted_in_several_transactions(tmp_path: Path) -> None:
    now = [1.0]

    async def work(store: Store) -> Any:
        await store.run(lambda c: [add(f"{i:05}", expires_at=500.0)(c) for i in range(2500)])
        now[0] = 1000.0
        return [len(await store.run(names)) for _ in range(4)]

    assert used(tmp_path, work, lambda: now[0])[0] == [1500, 500, 0, 0]


def test_transactions_wait_together_for_a_database_that_another_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_SECONDS", 0.5)

    async def work(store: Store) -> Any:
        await store.run(names)
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        results = await asyncio.gather(*(store.run(names) for _ in range(20)), return_exceptions=True)
        seconds = time.monotonic() - began
        other.close()
        await store.run(add("later"))
        assert all(isinstance(one, StoreError) for one in results)
        return seconds

    # One after the other, each with its own wait, they took 10 s.
    assert used(tmp_path, work)[0] < 5


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await store.run(lambda c: c.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}"))

    async def read(store: Store) -> Any:
        with pytest.raises(StoreError, match="newer weft"):
            await store.run(names)

    used(tmp_path, write)
    assert used(tmp_path, read) == (None, [])
