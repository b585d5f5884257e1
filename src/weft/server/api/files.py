"""`/v1/files`: uploads, lists, downloads and deletes the files of a key."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from weft.errors import WeftError
from weft.server.api.answer_format import Operation
from weft.server.api.listing import (
    Page,
    checked_number,
    counted_list,
    owner_of,
    page_parameters,
    page_query,
    page_response,
)
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response, refusal
from weft.server.http.uploads import UploadForm, read_upload
from weft.server.logs import current_record
from weft.server.state.files import StoredFile

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_BATCH_SECONDS = 30 * 86400
"""Default lifetime of the input file of a batch. Other files do not expire by default."""
_RANGE = re.compile(r"bytes=(?=.*[0-9])([0-9]{0,18})-([0-9]{0,18})")
MIN_SECONDS, MAX_SECONDS = 3600, 30 * 86400
"""The shortest and the longest lifetime that a client may choose, in seconds."""
_MAX_UPLOADS = 16
"""Limit for concurrent uploads. Each holds up to two megabytes in memory."""
_MAX_UPLOADS_OF_KEY = 4
"""Limit for the concurrent uploads of one key, if there are several keys. Uploads may take hours, so one key could
otherwise keep the others from uploading."""


class File(Shape):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Page):
    data: list[File]


class DeletedFile(Shape):
    id: str
    object: Literal["file"]
    deleted: bool


_ID = "Only the key that uploaded a file finds it; for others it does not exist (404)."

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/files"): Operation(
        "Upload a file",
        "The file is written to disk while it arrives. Input files of batches expire after 30 days by default, others do "
        "not.",
        "Files",
        File,
        errors=(400, 408, 413, 429, 503, 507),
        form={
            "type": "object",
            "properties": {
                "file": {
                    "type": "string",
                    "contentMediaType": "application/octet-stream",
                    "description": "The content.",
                },
                "purpose": {
                    "type": "string",
                    "enum": list(PURPOSES),
                    "description": f"One of {', '.join(PURPOSES)}.",
                },
                "expires_after[anchor]": {
                    "type": "string",
                    "enum": ["created_at"],
                    "description": "Always created_at.",
                },
                "expires_after[seconds]": {
                    "type": "integer",
                    "minimum": MIN_SECONDS,
                    "maximum": MAX_SECONDS,
                    "description": "Seconds until the file is deleted.",
                },
            },
            "required": ["file", "purpose"],
        },
    ),
    ("get", "/v1/files"): Operation(
        "List files",
        "Newest first. The default limit is 10000.",
        "Files",
        FileList,
        errors=(400, 404, 413, 429, 503),
        query={
            "purpose": {"type": "string", "description": "Only files with this purpose."},
            **page_parameters(10_000),
        },
    ),
    ("get", "/v1/files/{id}"): Operation("Describe a file", _ID, "Files", File, errors=(404, 503)),
    ("delete", "/v1/files/{id}"): Operation(
        "Delete a file",
        f"{_ID} The input file of a batch that has not ended is kept (409).",
        "Files",
        DeletedFile,
        errors=(404, 409, 503),
    ),
    ("get", "/v1/files/{id}/content"): Operation(
        "Download a file", _ID, "Files", None, errors=(404, 503), media_type="application/octet-stream"
    ),
}


def routes(services: Services) -> Sequence[Route]:
    handlers = _Files(services)
    return [
        Route("/v1/files", handlers.upload, methods=["POST"]),
        Route("/v1/files", handlers.list, methods=["GET"]),
        Route("/v1/files/{id}", handlers.describe, methods=["GET"]),
        Route("/v1/files/{id}", handlers.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", handlers.download, methods=["GET"]),
    ]


class _Files:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._files = services.files
        self._uploads = Counter[str]()
        """Owner -> number of its concurrent uploads."""
        has_keys = len(services.settings.api_keys) > 1
        self._most_own = _MAX_UPLOADS_OF_KEY if has_keys else _MAX_UPLOADS

    async def upload(self, request: Request) -> Response:
        body, owner = request.stream(), owner_of(request)
        try:
            total, own = self._uploads.total(), self._uploads[owner]
            if total >= _MAX_UPLOADS or own >= self._most_own:
                message = (
                    f"{total} files are being uploaded, {own} of them with this key; allowed: {_MAX_UPLOADS} at a time, "
                    f"{self._most_own} with one key; try again later"
                )
                raise ApiError(429, message, code="too_many_uploads")
            self._uploads[owner] += 1
            try:
                return json_response(described(await self._store_upload(request, body)))
            finally:
                self._uploads[owner] -= 1
        except (ApiError, WeftError):
            # Read the rest: a client that is still sending would see a reset connection instead of this error.
            with suppress(ApiError, ClientDisconnect):
                async for _ in body:
                    pass
            raise

    async def _store_upload(self, request: Request, body: AsyncIterator[bytes]) -> StoredFile:
        """Writes the file of a form while it arrives, and adds its row."""
        most = self._services.settings.max_file_bytes
        announced = int(request.headers.get("content-length") or 0)
        async with self._files.incoming(f"file-{current_record().id}", min(announced, most)) as new:
            content_type = request.headers.get("content-type", "")
            form = await read_upload(content_type, body, partial(self._files.write, new))
            if form.file_name is None:
                raise refusal("the form has no part file; add it", "file", "missing_field")
            if new.num_bytes > most:
                message = f"the file has {new.num_bytes} bytes; allowed: {most} (max_file_bytes); split it"
                raise ApiError(413, message, param="file", code="file_too_large")
            now = self._services.store.wall_clock()
            purpose, seconds = _purpose(form), _lifetime(form)
            row = StoredFile(
                *(new.id, owner_of(request), now, None if seconds is None else now + seconds),
                *(form.file_name, purpose, new.num_bytes),
            )
            await self._files.keep([(new, row)], lambda connection: self._files.check_space(connection, 0))
        return row

    async def list(self, request: Request) -> Response:
        query = page_query(request, default_limit=10_000, max_limit=10_000)
        found = await self._files.page(owner_of(request), request.query_params.get("purpose"), query)
        return counted_list(request, page_response(found, query, described))

    async def describe(self, request: Request) -> Response:
        return json_response(described(await self._find(request)))

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        deleted = await self._files.delete(owner_of(request), file_id)
        if isinstance(deleted, str):
            message = f"{file_id} is the input of {deleted}, which has not ended; cancel the batch first"
            raise ApiError(409, message, code="file_in_use")
        if not deleted:
            raise not_found(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def download(self, request: Request) -> Response:
        file = await self._find(request)
        path = self._files.path(file.id)
        try:
            found = await asyncio.to_thread(path.stat)
        except FileNotFoundError:
            raise not_found(file.id) from None
        _check_range(request.headers.get("range"), found.st_size)
        return FileResponse(path, media_type="application/octet-stream", stat_result=found)

    async def _find(self, request: Request) -> StoredFile:
        file_id = request.path_params["id"]
        file = await self._files.find(owner_of(request), file_id)
        if file is None:
            raise not_found(file_id)
        return file


def _check_range(given: str | None, size: int) -> None:
    """Raises ApiError if the header Range asks for anything but one part of the file. `FileResponse` would answer with plain
    text, which is not the error format of the API."""
    if given is None:
        return
    found = _RANGE.fullmatch(given)
    first, last = found.groups() if found else ("", "0")
    is_in_file = int(first) < size and int(last or size) >= int(first) if first else min(int(last), size) > 0
    if not is_in_file:
        message = (
            f"range is {given!r:.80}, and the file has {size} bytes; ask for one part, such as bytes=0-999"
        )
        raise ApiError(416, message, code="invalid_range", headers={"Content-Range": f"bytes */{size}"})


def not_found(file_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"there is no file {file_id!r:.80}", param=param, code="file_not_found")


def described(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _purpose(form: UploadForm) -> str:
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        found = "purpose is missing" if purpose is None else f"purpose is {purpose!r:.80}"
        message = f"{found}; allowed: {', '.join(PURPOSES)}"
        raise refusal(message, "purpose")
    return purpose


def _lifetime(form: UploadForm) -> int | None:
    anchor, text = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and text is None:
        return _BATCH_SECONDS if form.fields["purpose"] == "batch" else None
    if anchor not in (None, "created_at"):
        message = f"expires_after.anchor is {anchor!r:.80}; allowed: created_at"
        raise refusal(message, "expires_after.anchor")
    return check_seconds(text or "", "expires_after.seconds")


def check_seconds(given: str, param: str) -> int:
    """Parses a lifetime that a client chose. Raises ApiError if it is not allowed."""
    return checked_number(given, param, MIN_SECONDS, MAX_SECONDS)
