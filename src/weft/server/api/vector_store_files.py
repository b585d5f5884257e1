"""`/v1/vector_stores/ID/files` and `/file_batches`: the files of a vector store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.listing import (
    checked_number,
    count_bytes,
    counted_list,
    owner_of,
    page_parameters,
    page_query,
    page_response,
)
from weft.server.api.services import Services
from weft.server.api.vector_store_shapes import (
    AttributesChange,
    DeletedStoreFile,
    FileBatchObject,
    FileContent,
    FileObject,
    FilePage,
    FileRequest,
    FilesRequest,
    checked_chunks,
    checked_entries,
    described_batch,
    described_file,
)
from weft.server.api.vector_stores import attach, found_store, read_request
from weft.server.errors import ApiError, json_response, refusal, warning_header
from weft.server.logs import current_record
from weft.server.state import passages
from weft.server.state import vector_stores as rows
from weft.server.state.vector_stores import FILE_STATUSES, AttachedFile, FileBatch, FileDetails, VectorStore

_TAG = "Vector stores"
_FILES = "/v1/vector_stores/{id}/files"
_ONE = f"{_FILES}/{{file_id}}"
_BATCHES = "/v1/vector_stores/{id}/file_batches"
_BATCH = f"{_BATCHES}/{{batch_id}}"
_CONTENT_BYTES = 1 << 20
"""Bytes of text of one page of the content of a file."""
_FILTER = {
    "filter": {
        "type": "string",
        "enum": list(FILE_STATUSES),
        "description": "Only files with this status.",
    },
    **page_parameters(100),
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", _FILES): Operation(
        "Attach a file",
        "The file is read in the background: text, Markdown, HTML, PDF and source code. If it was attached before, it is "
        "read again.",
        _TAG,
        FileObject,
        FileRequest,
        errors=(400, 404, 408, 413, 503, 507),
    ),
    ("get", _FILES): Operation(
        "List the files of a vector store",
        "Newest first. The default limit is 20.",
        _TAG,
        FilePage,
        errors=(400, 404, 413, 429, 503),
        query=_FILTER,
    ),
    ("get", _ONE): Operation(
        "Describe a file of a vector store",
        "Its status, and why it failed.",
        _TAG,
        FileObject,
        errors=(404, 503),
    ),
    ("post", _ONE): Operation(
        "Change the attributes of a file",
        "The new attributes replace the old ones.",
        _TAG,
        FileObject,
        AttributesChange,
        errors=(400, 404, 408, 413, 503, 507),
    ),
    ("delete", _ONE): Operation(
        "Remove a file from a vector store",
        "The file itself stays in /v1/files.",
        _TAG,
        DeletedStoreFile,
        errors=(404, 503),
    ),
    ("get", f"{_ONE}/content"): Operation(
        "Read the passages of a file",
        "In order. Passages overlap. Nothing until the file is completed.",
        _TAG,
        FileContent,
        errors=(400, 404, 413, 429, 503),
        query={"page": {"type": "string", "description": "The next_page of the page before."}},
    ),
    ("post", _BATCHES): Operation(
        "Attach several files",
        "All of them, or none if one does not exist.",
        _TAG,
        FileBatchObject,
        FilesRequest,
        errors=(400, 404, 408, 413, 503, 507),
    ),
    ("get", _BATCH): Operation(
        "Describe a file batch", "How many of its files are read.", _TAG, FileBatchObject, errors=(404, 503)
    ),
    ("post", f"{_BATCH}/cancel"): Operation(
        "Cancel a file batch",
        "Files that are not read yet are cancelled. The others stay.",
        _TAG,
        FileBatchObject,
        errors=(404, 503, 507),
    ),
    ("get", f"{_BATCH}/files"): Operation(
        "List the files of a file batch",
        "Newest first. The default limit is 20.",
        _TAG,
        FilePage,
        errors=(400, 404, 413, 429, 503),
        query=_FILTER,
    ),
}


def routes(services: Services) -> Sequence[Route]:
    handlers = _StoreFiles(services)
    return [
        Route(_FILES, handlers.attach, methods=["POST"]),
        Route(_FILES, handlers.list, methods=["GET"]),
        Route(_ONE, handlers.describe, methods=["GET"]),
        Route(_ONE, handlers.change, methods=["POST"]),
        Route(_ONE, handlers.remove, methods=["DELETE"]),
        Route(f"{_ONE}/content", handlers.content, methods=["GET"]),
        Route(_BATCHES, handlers.attach_batch, methods=["POST"]),
        Route(_BATCH, handlers.describe_batch, methods=["GET"]),
        Route(f"{_BATCH}/cancel", handlers.cancel_batch, methods=["POST"]),
        Route(f"{_BATCH}/files", handlers.list_batch, methods=["GET"]),
    ]


class _StoreFiles:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    async def attach(self, request: Request) -> Response:
        given, unknown = await read_request(request, FileRequest)
        owner, now = owner_of(request), self._store.wall_clock()
        details = _details(given)

        def add(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            attach(connection, store, [(given.file_id, details)], owner, now)
            return described_file(_found_file(connection, store, given.file_id), store)

        content = await self._store.run(add)
        self._services.memory.wake()
        return json_response(content, headers=warning_header(unknown))

    async def list(self, request: Request) -> Response:
        return await self._list(request)

    async def describe(self, request: Request) -> Response:
        def read(connection: Any, store: VectorStore, file: AttachedFile) -> dict[str, Any]:
            return described_file(file, store)

        return json_response(await self._with_file(request, read))

    async def change(self, request: Request) -> Response:
        given, unknown = await read_request(request, AttributesChange)
        attributes = checked_entries(given.attributes, "attributes")

        def change(connection: Any, store: VectorStore, file: AttachedFile) -> dict[str, Any]:
            rows.set_attributes(connection, file, attributes)
            return described_file(_found_file(connection, store, file.id), store)

        return json_response(await self._with_file(request, change), headers=warning_header(unknown))

    async def remove(self, request: Request) -> Response:
        def remove(connection: Any, store: VectorStore, file: AttachedFile) -> dict[str, Any]:
            rows.detach(connection, file)
            return {"id": file.id, "object": "vector_store.file.deleted", "deleted": True}

        content = await self._with_file(request, remove)
        self._services.memory.wake()
        return json_response(content)

    async def content(self, request: Request) -> Response:
        after = checked_number(request.query_params.get("page", "0"), "page", 0, 10**9)

        def read(connection: Any, store: VectorStore, file: AttachedFile) -> dict[str, Any]:
            found, has_more = list[tuple[int, str]](), False
            if file.status == "completed":
                found, has_more = passages.texts(connection, file.number, store.number, after, _CONTENT_BYTES)
            return {
                "object": "vector_store.file_content.page",
                "data": [{"type": "text", "text": text} for _, text in found],
                "has_more": has_more,
                "next_page": str(found[-1][0]) if has_more else None,
            }

        count_bytes(request, _CONTENT_BYTES)
        return counted_list(request, await self._with_file(request, read))

    async def attach_batch(self, request: Request) -> Response:
        given, unknown = await read_request(request, FilesRequest)
        if bool(given.file_ids) == bool(given.files):
            raise refusal("send either file_ids or files, with at least one file", "file_ids")
        shared = _details(given)
        files = [(one, shared) for one in given.file_ids] or [
            (one.file_id, _details(one)) for one in given.files
        ]
        owner, now = owner_of(request), self._store.wall_clock()
        batch_id = f"vsfb_{current_record().id}"

        def add(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            rows.add_batch(connection, store, batch_id, now)
            attach(connection, store, files, owner, now, batch_id)
            return _described_batch(connection, store, _found_batch(connection, store, batch_id))

        content = await self._store.run(add)
        self._services.memory.wake()
        return json_response(content, headers=warning_header(unknown))

    async def describe_batch(self, request: Request) -> Response:
        return json_response(await self._with_batch(request, _described_batch))

    async def cancel_batch(self, request: Request) -> Response:
        def cancel(connection: Any, store: VectorStore, batch: FileBatch) -> dict[str, Any]:
            rows.cancel_batch(connection, batch)
            return _described_batch(connection, store, _found_batch(connection, store, batch.id))

        content = await self._with_batch(request, cancel)
        self._services.memory.wake()
        return json_response(content)

    async def list_batch(self, request: Request) -> Response:
        return await self._list(request, request.path_params["batch_id"])

    async def _list(self, request: Request, batch_id: str | None = None) -> Response:
        query, owner = page_query(request, default_limit=20, max_limit=100), owner_of(request)
        status, now = request.query_params.get("filter"), self._store.wall_clock()
        if status is not None and status not in FILE_STATUSES:
            raise refusal(f"filter is {status!r:.80}; allowed: {', '.join(FILE_STATUSES)}", "filter")

        def read(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            if batch_id is not None:
                _found_batch(connection, store, batch_id)
            found = rows.read_files(connection, store.number, query, status, batch_id)
            return page_response(found, query, lambda file: described_file(file, store))

        return counted_list(request, await self._store.run(read))

    async def _with_file(self, request: Request, work: Any) -> dict[str, Any]:
        """Runs `work` with the vector store and the file of the route. Raises a 404 if one of them does not exist."""
        owner, now = owner_of(request), self._store.wall_clock()

        def run(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            content: dict[str, Any] = work(
                connection, store, _found_file(connection, store, request.path_params["file_id"])
            )
            return content

        return await self._store.run(run)

    async def _with_batch(self, request: Request, work: Any) -> dict[str, Any]:
        """Runs `work` with the vector store and the file batch of the route. Raises a 404 if one of them does not exist."""
        owner, now = owner_of(request), self._store.wall_clock()

        def run(connection: Any) -> dict[str, Any]:
            store = found_store(connection, request, owner, now)
            content: dict[str, Any] = work(
                connection, store, _found_batch(connection, store, request.path_params["batch_id"])
            )
            return content

        return await self._store.run(run)


def _details(given: FileRequest | FilesRequest) -> FileDetails:
    attributes = checked_entries(given.attributes, "attributes")
    return FileDetails(attributes, checked_chunks(given.chunking_strategy))


def _described_batch(connection: Any, store: VectorStore, batch: FileBatch) -> dict[str, Any]:
    return described_batch(batch, store, rows.count_files(connection, store.number, batch.id))


def _found_file(connection: Any, store: VectorStore, file_id: str) -> AttachedFile:
    file = rows.find_file(connection, store.number, file_id)
    if file is None:
        message = f"{store.id} has no file {file_id!r:.80}"
        raise ApiError(404, message, param="file_id", code="file_not_found")
    return file


def _found_batch(connection: Any, store: VectorStore, batch_id: str) -> FileBatch:
    batch = rows.find_batch(connection, store.number, batch_id)
    if batch is None:
        message = f"{store.id} has no file batch {batch_id!r:.80}"
        raise ApiError(404, message, param="batch_id", code="batch_not_found")
    return batch
