"""`/v1/batches`: makes, lists and cancels batches. `weft.server.batches` runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api import schema
from weft.server.api.answer_format import Operation
from weft.server.api.embeddings import PATH as EMBEDDINGS
from weft.server.api.files import MAX_SECONDS, MIN_SECONDS, check_seconds, not_found
from weft.server.api.listing import Page, counted_list, owner_of, page_parameters, page_query, page_response
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response, refusal, warning_header
from weft.server.http.bodies import read_body
from weft.server.logs import current_record
from weft.server.state import batches as rows
from weft.server.state import files
from weft.server.state.batches import STATUSES, Batch, BatchDetails, Status

_MAX_BODY_BYTES = 64 << 10
_MAX_UNFINISHED = 1000
"""Limit for the batches of one key that have not ended."""
_MAX_METADATA, _MAX_NAME, _MAX_VALUE = 16, 64, 512
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW = 30 * 86400
_STATUSES_WITH_TIME = [one for one in STATUSES if one != "validating"]


class OutputExpiry(msgspec.Struct, frozen=True):
    """When the output files of a batch are deleted."""

    seconds: Annotated[int, Meta(description=f"Lifetime of the files, {MIN_SECONDS} to {MAX_SECONDS}.")]
    anchor: Annotated[Literal["created_at"], Meta(description="The lifetime begins when a file is made.")] = (
        "created_at"
    )


class BatchRequest(msgspec.Struct, frozen=True):
    """A batch: a file of requests, run while clients leave capacity."""

    input_file_id: Annotated[str, Meta(description="The id of an uploaded file with the purpose batch.")]
    endpoint: Annotated[str, Meta(description="The route of all lines. Each line has it as its `url`.")]
    completion_window: Annotated[
        str,
        Meta(
            description="Lines that did not run in this time get an error. A number and s, m, h or d; at most 30d."
        ),
    ] = "24h"
    metadata: Annotated[
        dict[str, str] | None,
        Meta(
            description=f"Returned with the batch. At most {_MAX_METADATA} entries, with names of at most {_MAX_NAME} "
            f"and values of at most {_MAX_VALUE} characters."
        ),
    ] = None
    output_expires_after: Annotated[
        OutputExpiry | None,
        Meta(
            description="When the output files are deleted: an object with `seconds`. Default: they are kept."
        ),
    ] = None


class WrongLine(Shape):
    code: str
    message: str
    param: str | None
    line: Annotated[int | None, Meta(description="Line of the input file, from 1.")]


class WrongLines(Shape):
    object: Literal["list"]
    data: list[WrongLine]


class RequestCounts(Shape):
    total: Annotated[int, Meta(description="0 until the file is validated.")]
    completed: int
    failed: int


class BatchObject(Shape):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Annotated[WrongLines | None, Meta(description="The first 100 wrong lines.")]
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Page):
    data: list[BatchObject]


_ID = "Only the key that made a batch finds it; for others it does not exist (404)."

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/batches"): Operation(
        "Make a batch",
        "Runs the lines of an uploaded file as requests of low priority, while clients leave capacity. Wrong lines are "
        "reported and the others run; the batch fails if all are wrong.",
        "Batches",
        BatchObject,
        BatchRequest,
        errors=(400, 404, 408, 413, 429, 503, 507),
    ),
    ("get", "/v1/batches"): Operation(
        "List batches",
        "Newest first. The default limit is 20.",
        "Batches",
        BatchList,
        errors=(400, 404, 413, 429, 503),
        query=page_parameters(100),
    ),
    ("get", "/v1/batches/{id}"): Operation(
        "Describe a batch", _ID, "Batches", BatchObject, errors=(404, 503)
    ),
    ("post", "/v1/batches/{id}/cancel"): Operation(
        "Cancel a batch",
        "Lines in flight are stopped. The results of the others stay in the output file.",
        "Batches",
        BatchObject,
        errors=(404, 409, 503, 507),
    ),
}


def routes(services: Services) -> Sequence[Route]:
    handlers = _Batches(services)
    return [
        Route("/v1/batches", handlers.create, methods=["POST"]),
        Route("/v1/batches", handlers.list, methods=["GET"]),
        Route("/v1/batches/{id}", handlers.describe, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", handlers.cancel, methods=["POST"]),
    ]


class _Batches:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store

    async def create(self, request: Request) -> Response:
        body = await read_body(request)
        if len(body) > _MAX_BODY_BYTES:
            message = f"the body has {len(body)} bytes; allowed: {_MAX_BODY_BYTES}"
            raise ApiError(413, message, code="body_too_large")
        given, unknown = schema.read(BatchRequest, bytes(body))
        endpoints = [path for path in self._services.formats if path.startswith("/v1/")] + [EMBEDDINGS]
        if given.endpoint not in endpoints:
            message = f"endpoint is {given.endpoint!r:.80}; allowed: {', '.join(endpoints)}"
            raise refusal(message, "endpoint")
        _check_metadata(given.metadata or {})
        output_seconds = None
        if given.output_expires_after is not None:
            param = "output_expires_after.seconds"
            output_seconds = check_seconds(str(given.output_expires_after.seconds), param)
        owner, now = owner_of(request), self._store.wall_clock()
        details = BatchDetails(given.endpoint, given.completion_window, given.metadata, output_seconds)
        batch = Batch(
            *(f"batch_{current_record().id}", owner, now, now + _window(given.completion_window)),
            *("validating", given.input_file_id, details),
        )

        def add(connection: Any) -> None:
            file = files.find(connection, owner, batch.input_file_id, now)
            if file is None:
                raise not_found(batch.input_file_id, "input_file_id")
            if file.purpose != "batch":
                message = f"{file.id} has the purpose {file.purpose}; upload it with the purpose batch"
                raise refusal(message, "input_file_id")
            if rows.count_unfinished(connection, owner) >= _MAX_UNFINISHED:
                message = f"{_MAX_UNFINISHED} batches have not ended; allowed: {_MAX_UNFINISHED}; wait or cancel some"
                raise ApiError(429, message, code="too_many_batches", retry_after=60.0)
            rows.add(connection, batch)

        await self._store.run(add)
        self._services.wake_batches()
        return json_response(described(batch), headers=warning_header(unknown))

    async def list(self, request: Request) -> Response:
        query, owner = page_query(request, default_limit=20, max_limit=100), owner_of(request)
        found = await self._store.run(lambda connection: rows.read_batches(connection, owner, query))
        return counted_list(request, page_response(found, query, described))

    async def describe(self, request: Request) -> Response:
        owner, batch_id = owner_of(request), request.path_params["id"]
        return json_response(
            described(await self._store.run(lambda connection: _found(connection, batch_id, owner)))
        )

    async def cancel(self, request: Request) -> Response:
        owner, batch_id, now = owner_of(request), request.path_params["id"], self._store.wall_clock()

        def cancel(connection: Any) -> Batch:
            batch = _found(connection, batch_id, owner)
            if batch.status not in ("validating", "in_progress", "cancelling"):
                message = f"{batch_id} is {batch.status}; a batch can be cancelled while it is validating or in_progress"
                raise ApiError(409, message, code="batch_not_running")
            return rows.change(connection, batch_id, (batch.status,), "cancelling", now) or batch

        batch = await self._store.run(cancel)
        self._services.wake_batches()
        return json_response(described(batch))


def described(batch: Batch) -> dict[str, Any]:
    details = batch.details
    errors = [
        {"code": one.code, "message": one.message, "param": one.param, "line": one.line}
        for one in details.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": details.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": details.completion_window,
        "status": batch.status,
        "output_file_id": details.output_file_id,
        "error_file_id": details.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{f"{status}_at": details.times.get(status) for status in _STATUSES_WITH_TIME},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": details.metadata,
    }


def _found(connection: Any, batch_id: str, owner: str) -> Batch:
    batch = rows.find(connection, batch_id, owner)
    if batch is None:
        raise ApiError(404, f"there is no batch {batch_id!r:.80}", code="batch_not_found")
    return batch


def _window(text: str) -> int:
    """Parses a completion window, such as 24h, to seconds."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 1 <= seconds <= _MAX_WINDOW:
        message = (
            f"completion_window is {text!r:.80}; allowed: a number and s, m, h or d, at most 30d, such as 24h"
        )
        raise refusal(message, "completion_window")
    return seconds


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        message = f"metadata has {len(metadata)} entries; allowed: {_MAX_METADATA}"
        raise refusal(message, "metadata")
    for name, value in metadata.items():
        if len(name) > _MAX_NAME or len(value) > _MAX_VALUE:
            message = (
                f"metadata has {name!r:.80} with a value of {len(value)} characters; allowed: names of {_MAX_NAME} and "
                f"values of {_MAX_VALUE} characters"
            )
            raise refusal(message, "metadata")
