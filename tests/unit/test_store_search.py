"""A search in a store that changes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.embedding import EmbeddingSpec
from weft.memory.documents import Passage
from weft.memory.prompting import Source
from weft.request import RequestId
from weft.server.errors import ApiError
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.search import Searcher, SearchRequest
from weft.server.state import passages, vector_stores
from weft.server.state.store import Store
from weft.server.state.vector_stores import FileDetails, StoreDetails, VectorStore

DIMENSIONS = 4


class Embedder:
    """Makes the same vector of every text. Before that, it calls `before`."""

    name = "m"
    spec = EmbeddingSpec("embed", "mean", DIMENSIONS, max_tokens=100)

    def __init__(self, before: Any) -> None:
        self._before = before

    async def embed(self, texts: Sequence[str], kind: str, **_: object) -> np.ndarray:
        await self._before()
        return np.eye(1, DIMENSIONS, dtype=np.float32).repeat(len(texts), 0)

    async def count_tokens(self, texts: Sequence[str], kind: str) -> list[int]:
        return [1 for _ in texts]


def search(folder: Path, change: Any, *, times: int = 1) -> list[Source]:
    """The last of some searches in a store with one passage. `change` runs while their query is embedded."""

    async def run() -> list[Source]:
        store = Store(folder, lambda *_: None)

        def fill(connection: Any) -> VectorStore:
            now = store.wall_clock()
            made = vector_stores.add(connection, "vs_1", "", now, "", "m", DIMENSIONS, StoreDetails())
            vector_stores.attach(connection, made, [("file-1", "a.txt", FileDetails())], now)
            file = vector_stores.find_file(connection, made.number, "file-1")
            assert file is not None
            vectors = np.eye(1, DIMENSIONS, dtype=np.float32)
            passages.add(connection, made.number, file.number, [Passage(0, 5, "river")], vectors)
            vector_stores.finish(connection, file.number, "completed", num_passages=1)
            return made

        made = await store.run(fill)
        searcher = Searcher(store, StoreIndexes(store, lambda *_, **__: None, 1))
        embedder: Any = Embedder(lambda: store.run(lambda connection: change(connection, made)))
        asked = SearchRequest("", ["vs_1"], ["river"], request_id=RequestId("r"))
        try:
            for _ in range(times):
                found = await searcher.search(asked, embedder, None)
        finally:
            await store.close()
        return found

    return asyncio.run(run())


def test_a_store_that_is_deleted_during_a_search_is_not_found(tmp_path: Path) -> None:
    def delete(connection: Any, store: VectorStore) -> None:
        vector_stores.delete(connection, store)
        while passages.remove_leftovers(connection, 0.0):
            pass

    with pytest.raises(ApiError) as raised:
        search(tmp_path, delete)
    assert (raised.value.status, raised.value.code) == (404, "vector_store_not_found")


def test_a_search_finds_what_was_added_while_its_query_was_embedded(tmp_path: Path) -> None:
    """The index is that of the transaction that asks for the words."""

    def add(connection: Any, store: VectorStore) -> None:
        name = f"file-{connection.total_changes}"
        vector_stores.attach(connection, store, [(name, "b.txt", FileDetails())], 0.0)
        file = vector_stores.find_file(connection, store.number, name)
        assert file is not None
        vectors = np.eye(1, DIMENSIONS, dtype=np.float32)
        # The query has none of these words.
        passages.add(connection, store.number, file.number, [Passage(0, 5, "stone")], vectors)
        vector_stores.finish(connection, file.number, "completed", num_passages=1)

    assert [one.text for one in search(tmp_path / "a", add)] == ["river", "stone"]
    assert [one.text for one in search(tmp_path / "b", add, times=2)] == ["river", "stone", "stone"]
