"""Searches vector stores: by vectors and by words, joined by rank, then reranked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.errors import PromptTooLongError
from weft.memory.filters import Filter
from weft.memory.prompting import Source
from weft.memory.ranking import fused, words_query
from weft.request import RequestId
from weft.server.errors import ApiError
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.ingest import other_model, unit
from weft.server.state import passages, vector_stores
from weft.server.state.store import Store
from weft.server.state.vector_stores import VectorStore
from weft.server.vectors.interface import Embedder, Reranker
from weft.vectors import Vectors, np

if TYPE_CHECKING:
    from sqlite3 import Connection

MAX_RESULTS = 50
_CANDIDATES = 50
"""Each of the two rankings that are joined (by vectors, by words) has at most this many passages, or twice `max_results`
if that is more."""
_RERANKED = 32
"""A reranker scores this many candidates, or `max_results` if that is more. Each costs one forward pass over the query and
the passage."""


@dataclass(frozen=True)
class SearchRequest:
    """The parameters of a search, checked."""

    owner: str
    store_ids: Sequence[str]
    queries: Sequence[str]
    max_results: int = 10
    filter: Filter | None = None
    score_threshold: float = 0.0
    """Drops results with a lower score. 0 drops none: scores of a reranker may be logits, which are often negative."""
    vector_weight: float = 1.0
    words_weight: float = 1.0
    reranks: bool = True
    client_id: str = ""
    request_id: RequestId = field(kw_only=True)
    """The id of the request that searches. The engines compute the vector of the query and the scores under this id."""


class Searcher:
    """Has no state. Belongs to one event loop."""

    def __init__(self, store: Store, indexes: StoreIndexes) -> None:
        self._store = store
        self._indexes = indexes

    async def search(
        self, asked: SearchRequest, embedder: Embedder, reranker: Reranker | None
    ) -> list[Source]:
        """The best passages, best first. Raises ApiError if a store does not exist for the owner, or has vectors of another
        model."""
        stores = await self.stores(asked, embedder)
        texts = [await _shortened(one, embedder) for one in asked.queries]
        vectors = unit(
            await embedder.embed(texts, "query", request_id=asked.request_id, client_id=asked.client_id)
        )
        count = max(_CANDIDATES, 2 * asked.max_results)
        scores: dict[int, float] = {}
        for store in stores:
            for text, vector in zip(asked.queries, vectors, strict=True):
                for passage_id, score in await self._ranked(store, asked, text, vector, count):
                    scores[passage_id] = max(score, scores.get(passage_id, 0.0))
        ranked = sorted(scores.items(), key=lambda one: (-one[1], one[0]))
        if reranker is not None and asked.reranks:
            return await self._reranked(ranked[: max(_RERANKED, asked.max_results)], asked, reranker)
        best = [one for one in ranked if one[1] >= asked.score_threshold][: asked.max_results]
        return await self._store.run(lambda connection: passages.sources(connection, best))

    async def stores(self, asked: SearchRequest, embedder: Embedder) -> list[VectorStore]:
        """The stores of a search. Raises as `search` does."""
        now = self._store.wall_clock()

        def find(connection: Connection) -> list[VectorStore]:
            found = []
            for store_id in dict.fromkeys(asked.store_ids):
                store = vector_stores.find(connection, store_id, asked.owner, now)
                if store is None:
                    raise store_not_found(store_id)
                vector_stores.touch(connection, store, now)
                found.append(store)
            return found

        stores = await self._store.run(find)
        for store in stores:
            if (store.model, store.dimensions) != (embedder.name, embedder.spec.dimensions):
                raise ApiError(409, other_model(store, embedder), code="other_embedding_model")
        return stores

    async def _ranked(
        self, store: VectorStore, asked: SearchRequest, text: str, vector: Vectors, count: int
    ) -> list[tuple[int, float]]:
        """The ids of the best passages of one store for one query, with the scores of the joined rankings."""
        words = words_query(text) if asked.words_weight else None
        chosen, now = asked.filter, self._store.wall_clock()

        def read(connection: Connection) -> tuple[VectorStore, list[int] | None, list[int]]:
            present = vector_stores.by_number(connection, store.number, now)
            if present is None:  # it was deleted while the query was embedded
                raise store_not_found(store.id)
            files = None
            if chosen is not None:
                attached = vector_stores.completed_files(connection, store.number)
                files = [one.number for one in attached if chosen(one.details.attributes)]
            found = passages.by_words(connection, store.number, words, count, files) if words else []
            return present, files, found

        present, files, by_words = await self._store.run(read)
        if files is not None and not files:
            return []
        by_vector: list[int] = []
        if asked.vector_weight:
            index = await self._indexes.current(present)
            among = None if files is None else np.array(files, np.int64)
            nearest = await asyncio.to_thread(index.search, vector, count, among)
            by_vector = [passage_id for passage_id, _ in nearest]
        return fused(by_vector, by_words, asked.vector_weight, asked.words_weight)

    async def _reranked(
        self, ranked: list[tuple[int, float]], asked: SearchRequest, reranker: Reranker
    ) -> list[Source]:
        """Scores the ranked passages with the reranker. Returns the best ones with at least the score of the request."""
        sources = await self._store.run(lambda connection: passages.sources(connection, ranked))
        if not sources:
            return []
        query = "\n".join(asked.queries)
        scores = await reranker.rerank(
            query,
            [one.searched_text for one in sources],
            request_id=asked.request_id,
            client_id=asked.client_id,
        )
        scored = [one.with_score(score) for one, score in zip(sources, scores, strict=True)]
        scored.sort(key=lambda one: -one.score)
        least = asked.score_threshold or -math.inf
        return [one for one in scored if one.score >= least][: asked.max_results]


async def _shortened(query: str, embedder: Embedder) -> str:
    """A query, cut to what the embedding model reads. The search by words uses the whole query."""
    limit = embedder.spec.max_tokens
    while True:
        try:
            [count] = await embedder.count_tokens([query], "query")
        except PromptTooLongError as error:
            count = error.num_tokens
        if count <= limit or len(query) <= 1:
            return query
        query = query[: min(len(query) - 1, len(query) * limit // count)]


def store_not_found(store_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no vector store {store_id!r:.80}",
        param="vector_store_id",
        code="vector_store_not_found",
    )
