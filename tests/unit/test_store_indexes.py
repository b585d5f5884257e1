"""The indexes of vector stores: how they are loaded, and when they are merged. The limit for exact search is 50."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("usearch")

import weft.memory.index_file as index_file
import weft.memory.vector_index as vector_index
import weft.server.memory.indexes as indexes_module
from weft.memory.documents import Passage
from weft.server.memory.indexes import StoreIndexes
from weft.server.state import passages, vector_stores
from weft.server.state.store import Store
from weft.server.state.vector_stores import FileDetails, StoreDetails, VectorStore

DIMENSIONS = 8
PIECE = 16


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "MAX_EXACT", 50)
    monkeypatch.setattr(vector_index, "_PIECE", PIECE)
    monkeypatch.setattr(indexes_module, "_PIECE", PIECE)


class Memory:
    """One vector store in a database of its own, and its index."""

    def __init__(self, folder: Path) -> None:
        self.events: list[str] = []
        self.store = Store(folder, lambda *_: None)
        self.indexes = StoreIndexes(self.store, lambda event, *_, **__: self.events.append(event), 1)
        self.folder = folder / "indexes"

    async def create(self) -> None:
        def add(connection: Any) -> VectorStore:
            return vector_stores.add(connection, "vs_1", "", 0.0, "", "m", DIMENSIONS, StoreDetails())

        self.number = (await self.store.run(add)).number

    async def row(self) -> VectorStore:
        found = await self.store.run(lambda connection: vector_stores.by_number(connection, self.number, 0.0))
        assert found is not None
        return found

    async def add(self, name: str, count: int) -> None:
        """A completed file with so many passages."""

        def work(connection: Any) -> None:
            store = vector_stores.by_number(connection, self.number, 0.0)
            assert store is not None
            vector_stores.attach(connection, store, [(name, name, FileDetails())], 0.0)
            file = vector_stores.find_file(connection, self.number, name)
            assert file is not None
            vectors = np.random.default_rng(file.number).standard_normal((count, DIMENSIONS))
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            texts = [Passage(0, 1, f"{name} {index}") for index in range(count)]
            passages.add(connection, self.number, file.number, texts, vectors.astype(np.float32))
            vector_stores.finish(connection, file.number, "completed", num_passages=count)

        await self.store.run(work)

    async def remove(self, name: str) -> None:
        await self.store.run(lambda connection: detach(connection, self.number, name))

    async def index(self) -> vector_index.VectorIndex:
        return await self.indexes.current(await self.row())

    async def merged(self) -> vector_index.VectorIndex:
        """The index after the merge that runs."""
        one = self.indexes._open["vs_1"]
        while one.merging is not None:
            await asyncio.wait([one.merging])
        return one.index

    async def vectors(self) -> dict[int, np.ndarray]:
        """The stored vectors of all passages that are visible."""

        def work(connection: Any) -> dict[int, np.ndarray]:
            rows = connection.execute(
                "SELECT passage, vector FROM vectors JOIN passages p ON p.id = passage"
                " JOIN vector_store_files f ON f.number = p.file AND f.status = 'completed'"
            )
            return {passage: np.frombuffer(vector, "<f2").astype(np.float32) for passage, vector in rows}

        return await self.store.run(work)

    async def check(self, index: vector_index.VectorIndex) -> None:
        """Each visible passage is found by its vector, and no other one."""
        vectors = await self.vectors()
        assert index.ids.tolist() == sorted(vectors)
        for passage, vector in vectors.items():
            [(found, score)] = index.search(vector, 1)
            assert found == passage and score > 0.99


def detach(connection: Any, number: int, name: str) -> None:
    file = vector_stores.find_file(connection, number, name)
    assert file is not None
    vector_stores.detach(connection, file)


def run(folder: Path, work: Callable[[Memory], Awaitable[None]]) -> Memory:
    memory = Memory(folder)

    async def run_and_close() -> None:
        try:
            await memory.create()
            async with asyncio.timeout(60):
                await work(memory)
        finally:
            await memory.indexes.close()
            await memory.store.close()

    asyncio.run(run_and_close())
    return memory


def test_a_large_store_is_loaded_in_pieces_and_other_transactions_come_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    load_vectors = passages.load_vectors

    def spy(connection: Any, store: int, ids: Any, out: Any) -> list[int]:
        sizes.append(len(ids))
        return load_vectors(connection, store, ids, out)

    monkeypatch.setattr(passages, "load_vectors", spy)

    async def work(memory: Memory) -> None:
        for number in range(10):
            await memory.add(f"file-{number}", 9)
        await memory.add("file-large", 40)
        loading = asyncio.create_task(memory.index())
        num_between = 0
        while not loading.done():
            await memory.store.run(lambda connection: connection.execute("SELECT 1").fetchone())
            num_between += 1
        await memory.check(await loading)
        assert num_between >= 8, "the database was held all the time"
        assert sum(sizes) == 130 and max(sizes) <= PIECE

    run(tmp_path, work)


def test_passages_that_are_removed_while_they_are_loaded_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_vectors = passages.load_vectors

    async def work(memory: Memory) -> None:
        for name in ("a", "b", "c"):
            await memory.add(name, 12)

        def remove_first(connection: Any, store: int, ids: Any, out: Any) -> list[int]:
            if connection.execute("SELECT 1 FROM vector_store_files WHERE id = 'b'").fetchone():
                detach(connection, memory.number, "b")
                while passages.remove_leftovers(connection, 0.0):
                    pass
            return load_vectors(connection, store, ids, out)

        monkeypatch.setattr(passages, "load_vectors", remove_first)
        await memory.check(await memory.index())
        await memory.check(await memory.index())
        await memory.add("d", 12)
        await memory.check(await memory.index())

    run(tmp_path, work)


def test_passages_are_merged_without_a_search(tmp_path: Path) -> None:
    async def work(memory: Memory) -> None:
        for number in range(6):
            await memory.add(f"file-{number}", 10)
            await memory.indexes.passages_added(memory.number, 10)
            assert ("vs_1" in memory.indexes._open) == (number == 5), "small stores are not loaded"
        index = await memory.merged()
        assert index.base is not None and len(index.base.ids) == 60 and not len(index.delta_ids)
        assert (memory.folder / ((await memory.row()).index_file or "none")).exists()
        await memory.check(index)

    run(tmp_path, work)


def test_a_failed_merge_is_not_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "no space")

    async def work(memory: Memory) -> None:
        await memory.add("a", 60)
        with monkeypatch.context() as patch:
            patch.setattr(index_file, "write_graph", fail)
            for _ in range(5):
                await memory.check(await memory.index())
                await memory.merged()
            assert memory.events == ["index_not_merged"]
            memory.indexes._open["vs_1"].merges_from = 0.0
            await memory.index()
            await memory.merged()
            assert len(memory.events) == 2
        await memory.index()
        assert (await memory.merged()).base is None
        memory.indexes._open["vs_1"].merges_from = 0.0
        await memory.index()
        assert (await memory.merged()).base is not None

    run(tmp_path, work)


@pytest.mark.parametrize("num_left", [0, 1, 3])
def test_removed_passages_leave_the_base_when_they_are_most_of_it(num_left: int, tmp_path: Path) -> None:
    async def work(memory: Memory) -> None:
        for number in range(8):
            await memory.add(f"file-{number}", 20)
        await memory.index()
        assert len((await memory.merged()).ids) == 160
        size = (memory.folder / ((await memory.row()).index_file or "")).stat().st_size
        await memory.remove("file-7")
        await memory.index()
        base = (await memory.merged()).base
        assert base is not None and len(base.ids) == 160, "few removed passages stay"
        for number in range(num_left, 7):
            await memory.remove(f"file-{number}")
        await memory.add("file-late", 5)
        await memory.index()
        index = await memory.merged()
        assert index.base is not None and len(index.base.ids) == 20 * num_left + 5
        await memory.check(index)
        [file] = memory.folder.iterdir()
        assert file.name == (await memory.row()).index_file and file.stat().st_size < size / 2
        again = StoreIndexes(memory.store, lambda *_, **__: None, 1)
        await memory.check(await again.current(await memory.row()))

    run(tmp_path, work)


def test_only_the_newest_damaged_file_is_kept(tmp_path: Path) -> None:
    async def work(memory: Memory) -> None:
        await memory.add("a", 60)
        for number in range(3):
            memory.indexes = StoreIndexes(
                memory.store, lambda event, *_, **__: memory.events.append(event), 1
            )
            await memory.check(await memory.index())
            await memory.merged()
            path = memory.folder / ((await memory.row()).index_file or "none")
            path.write_bytes(b"damaged %d" % number)
        memory.indexes = StoreIndexes(memory.store, lambda event, *_, **__: memory.events.append(event), 1)
        await memory.check(await memory.index())
        await memory.merged()
        (memory.folder / "vs_9-ab.damaged").write_bytes(b"of an earlier version")
        await memory.indexes.remove_leftovers()
        named = (await memory.row()).index_file
        assert {each.name for each in memory.folder.iterdir()} == {named, "last.damaged"}
        assert (memory.folder / "last.damaged").read_bytes() == b"damaged 2"
        assert memory.events == ["damaged_index"] * 3

    run(tmp_path, work)
