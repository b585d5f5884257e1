"""The memory of the server: creates and connects the store, the indexes, the ingestion and the search."""

from __future__ import annotations

from collections.abc import Callable

from weft.memory.prompting import Source
from weft.server.errors import ApiError
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.ingest import Ingest
from weft.server.memory.ingest_runner import IngestRunner
from weft.server.memory.reader import DocumentReader
from weft.server.memory.search import Searcher, SearchRequest
from weft.server.state.files import FileStore
from weft.server.state.store import Store
from weft.server.vectors.interface import Embedder, Reranker


class DocumentMemory:
    """Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        files: FileStore,
        embedder: Callable[[], Embedder | None],
        reranker: Callable[[], Reranker | None],
        log: Callable[..., object],
        is_draining: Callable[[], bool],
        threads: int | None = None,
    ) -> None:
        self._embedder = embedder
        self._reranker = reranker
        self._reader = DocumentReader()
        indexes = self._indexes = StoreIndexes(store, log, threads)
        self._searcher = Searcher(store, indexes)

        def ingest() -> Ingest | None:
            found = embedder()
            return None if found is None else Ingest(store, files, self._reader, found)

        self._runner = IngestRunner(store, indexes, ingest, log, is_draining)

    @property
    def embedder(self) -> Embedder:
        """The embedding model. Raises ApiError if the server has none."""
        found = self._embedder()
        if found is None:
            message = "this server has no embedding model, which vector stores need; start it with --embedder default"
            raise ApiError(400, message, code="no_embedding_model")
        return found

    async def check(self, asked: SearchRequest) -> None:
        """Raises ApiError if a store of the search does not exist for its owner, or has vectors of another model."""
        await self._searcher.stores(asked, self.embedder)

    async def search(self, asked: SearchRequest) -> list[Source]:
        return await self._searcher.search(asked, self.embedder, self._reranker())

    def wake(self) -> None:
        """Call after files were attached or removed."""
        self._runner.wake()

    async def run(self) -> None:
        """Reads attached files until it is cancelled."""
        await self._runner.run()

    async def close(self) -> None:
        await self._indexes.close()
        await self._reader.close()
