"""`/v1/vector_stores`: makes, lists, changes, deletes and searches vector stores. `vector_store_files` has their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api import schema
from weft.server.api.answer_format import Operation
from weft.server.api.files import not_found as file_not_found
from weft.server.api.listing import counted_list, owner_of, page_parameters, page_query, page_response
from weft.server.api.services import Services
from weft.server.api.vector_store_shapes import (
    MAX_FILES,
    MAX_FILES_AT_ONCE,
    MAX_STORES,
    DeletedStore,
    SearchResults,
    StoreChange,
    StoreList,
    StoreObject,
    StoreRequest,
    StoreSearch,
    checked_chunks,
    checked_count,
    checked_days,
    checked_entries,
    checked_filter,
    checked_name,
    checked_queries,
    checked_ranking,
    described_result,
    described_store,
)
from weft.server.errors import ApiError, json_response, refusal, warning_header
from weft.server.http.bodies import read_body
from weft.server.logs import current_record
from weft.server.memory.search import SearchRequest, store_not_found
from weft.server.plain_requests import PlainRequest
from weft.server.state import files as file_rows
from weft.server.state import vector_stores as rows
from weft.server.state.vector_stores import FileDetails, StoreDetails, VectorStore

T = TypeVar("T", bound=msgspec.Struct)

_MAX_BODY_BYTES = 1 << 20
_TAG = "Vector stores"
_ONE = "/v1/vector_stores/{id}"
_ID = "Only the key that made a vector store finds it; for others it does not exist (404)."

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/vector_stores"): Operation(
        "Make a vector store",
        "A set of files that can be searched. Files are read in the background. Needs an embedding model.",
        _TAG,
        StoreObject,
        StoreRequest,
        errors=(400, 404, 408, 413, 429, 503, 507),
    ),
    ("get", "/v1/vector_stores"): Operation(
        "List vector stores",
        "Newest first. The default limit is 20.",
        _TAG,
        StoreList,
        errors=(400, 404, 413, 429, 503),
        query=page_parameters(100),
    ),
    ("get", _ONE): Operation("Describe a vector store", _ID, _TAG, StoreObject, errors=(404, 503)),
    ("post", _ONE): Operation(
        "Change a vector store",
        f"{_ID} Its time of expiry begins again.",
        _TAG,
        StoreObject,
        StoreChange,
        errors=(400, 404, 408, 413, 503, 507),
    ),
    ("delete", _ONE): Operation(
        "Delete a vector store", f"{_ID} Its files stay in /v1/files.", _TAG, DeletedStore, errors=(404, 503)
    ),
    ("post", f"{_ONE}/search"): Operation(
        "Search a vector store",
        "Finds passages by meaning and by words. The best are first.",
        _TAG,
        SearchResults,
        StoreSearch,
        errors=(400, 404, 408, 409, 413, 429, 500, 503),
    ),
}


def routes(services: Services) -> Sequence[Route]:
    handlers = _VectorStores(services)
    return [
        Route("/v1/vector_stores", handlers.create, methods=["POST"]),
        Route("/v1/vector_stores", handlers.list, methods=["GET"]),
        Route(_ONE, handlers.describe, methods=["GET"]),
        Route(_ONE, handlers.change, methods=["POST"]),
        Route(_ONE, handlers.delete, methods=["DELETE"]),
        Route(f"{_ONE}/search", handlers.search, methods=["POST"]),
    ]


class _VectorStores:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    async def create(self, request: Request) -> Response:
        given, unknown = await read_request(request, StoreRequest)
        owner, now = owner_of(request), self._store.wall_clock()
        name, days = checked_name(given.name), checked_days(given.expires_after)
        metadata = checked_entries(given.metadata, "metadata")
        details = StoreDetails(metadata, days, checked_chunks(given.chunking_strategy))
        embedder = self._services.memory.embedder
        store_id = f"vs_{current_record().id}"

        def add(connection: Any) -> dict[str, Any]:
            if (count := rows.count_stores(connection, owner, now)) >= MAX_STORES:
                message = f"the key has {count} vector stores; allowed: {MAX_STORES}; delete some"
                raise ApiError(429, message, code="too_many_vector_stores")
            store = rows.add(
                connection, store_id, owner, now, name, embedder.name, embedder.spec.dimensions, details
            )
            if given.file_ids:
                attach(connection, store, [(one, FileDetails()) for one in given.file_ids], owner, now)
            return described_store(store, rows.count_files(connection, store.number))

        content = await self._store.run(add)
        self._services.memory.wake()
        return json_response(content, headers=warning_header(unknown))

    async def list(self, request: Request) -> Response:
        query, owner = page_query(request, default_limit=20, max_limit=100), owner_of(request)
        now = self._store.wall_clock()

        def read(connection: Any) -> dict[str, Any]:
            found = rows.read_stores(connection, owner, query, now)
            return page_response(
                found, query, lambda store: described_store(store, rows.count_files(connection, store.number))
            )

        return counted_list(request, await self._store.run(read))

    async def describe(self, request: Request) -> Response:
        owner, now = owner_of(request), self._store.wall_clock()

        def read(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            return described_store(store, rows.count_files(connection, store.number))

        return json_response(await self._store.run(read))

    async def change(self, request: Request) -> Response:
        content, unknown = await read_request(request, StoreChange, nulls=True)
        given, names = content
        owner, now = owner_of(request), self._store.wall_clock()
        name, days = checked_name(given.name or ""), checked_days(given.expires_after)
        metadata = checked_entries(given.metadata, "metadata")

        def change(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            details = store.details
            if "metadata" in names:
                details = msgspec.structs.replace(details, metadata=metadata)
            if "expires_after" in names:
                details = msgspec.structs.replace(details, expires_days=days)
            rows.change(connection, store, now, name if "name" in names else store.name, details)
            store = found_store(connection, request, owner, now)
            return described_store(store, rows.count_files(connection, store.number))

        return json_response(await self._store.run(change), headers=warning_header(unknown))

    async def delete(self, request: Request) -> Response:
        owner, now = owner_of(request), self._store.wall_clock()

        def delete(connection: Any) -> str:
            store = found_store(connection, request, owner, now)
            rows.delete(connection, store)
            return store.id

        deleted = await self._store.run(delete)
        self._services.memory.wake()
        return json_response({"id": deleted, "object": "vector_store.deleted", "deleted": True})

    async def search(self, request: Request) -> Response:
        return await self._services.plain_requests.handle(
            request, StoreSearch, partial(self._search, request)
        )

    async def _search(self, request: Request, plain: PlainRequest[StoreSearch]) -> Response:
        given = plain.fields
        queries = checked_queries(given.query)
        asked = SearchRequest(
            owner_of(request),
            [request.path_params["id"]],
            queries,
            checked_count(given.max_num_results),
            checked_filter(given.filters),
            **checked_ranking(given.ranking_options),
            client_id=plain.client_id,
            request_id=plain.active.id,
        )
        found = await self._services.memory.search(asked)
        content = {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": [described_result(one) for one in found],
            "has_more": False,
            "next_page": None,
        }
        return counted_list(request, content)


async def read_request(request: Request, kind: type[T], *, nulls: bool = False) -> tuple[Any, list[str]]:
    """The parsed body, and the names of its unknown fields. With `nulls`, the first is a pair: the parsed body, and the
    names of all fields that the client sent, also those with null."""
    body = bytes(await read_body(request))
    if len(body) > _MAX_BODY_BYTES:
        message = f"the body has {len(body)} bytes; allowed: {_MAX_BODY_BYTES}"
        raise ApiError(413, message, code="body_too_large")
    given, unknown = schema.read(kind, body)
    if not nulls:
        return given, unknown
    return (given, set(msgspec.json.decode(body))), unknown


def found_store(connection: Any, request: Request, owner: str, now: float) -> VectorStore:
    store = rows.find(connection, request.path_params["id"], owner, now)
    if store is None:
        raise store_not_found(request.path_params["id"])
    return store


def attach(
    connection: Any,
    store: VectorStore,
    files: Sequence[tuple[str, FileDetails]],
    owner: str,
    now: float,
    batch_id: str | None = None,
) -> None:
    """Attaches files of the owner: all, or none if one does not exist."""
    if len(files) > MAX_FILES_AT_ONCE:
        raise refusal(f"{len(files)} files are attached at once; allowed: {MAX_FILES_AT_ONCE}", "file_ids")
    total = rows.count_files(connection, store.number).total + len(files)
    if total > MAX_FILES:
        raise refusal(f"{store.id} would have {total} files; allowed: {MAX_FILES}", "file_ids")
    found = []
    for file_id, details in files:
        file = file_rows.find(connection, owner, file_id, now)
        if file is None:
            raise file_not_found(file_id, "file_id")
        found.append((file.id, file.name, details))
    rows.touch(connection, store, now)
    rows.attach(connection, store, found, now, batch_id)
