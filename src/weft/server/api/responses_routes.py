"""The routes for stored responses: read, cancel and delete one, and list its input items.

The error for a response of another key is the same 404 as for an unknown id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api import responses_background as background
from weft.server.api.answer_format import Operation
from weft.server.api.listing import (
    count_bytes,
    counted_response,
    list_object,
    owner_of,
    page_parameters,
    page_query,
)
from weft.server.api.responses_shapes import DeletedResponse, InputItems, ResponseObject
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response, refusal
from weft.server.state import responses as table
from weft.server.state.paging import PageQuery

_MOST_ITEMS = 100
_ONE = "/v1/responses/{id}"

OPERATIONS = {
    ("get", _ONE): Operation(
        "Read a response",
        "A stored response, or the state of one in the background: queued, in_progress, completed, incomplete, failed or "
        "cancelled.",
        "Stored responses",
        ResponseObject,
        errors=(400, 404, 413, 429),
    ),
    ("delete", _ONE): Operation(
        "Delete a response",
        "Cancels it, if it has not ended.",
        "Stored responses",
        DeletedResponse,
        errors=(404,),
    ),
    ("post", f"{_ONE}/cancel"): Operation(
        "Cancel a background response",
        "One that has ended stays as it is.",
        "Stored responses",
        ResponseObject,
        errors=(400, 404, 413, 429),
    ),
    ("get", f"{_ONE}/input_items"): Operation(
        "List the input items of a response",
        "The default limit is 20.",
        "Stored responses",
        InputItems,
        errors=(400, 404, 413, 429),
        query=page_parameters(_MOST_ITEMS),
    ),
}

Handler = Callable[[Services, Request, str], Awaitable[Response]]


def routes(services: Services) -> Sequence[Route]:
    def route(path: str, handler: Handler, method: str) -> Route:
        async def handle(request: Request) -> Response:
            return await handler(services, request, owner_of(request))

        return Route(path, handle, methods=[method])

    return (
        route(_ONE, _read, "GET"),
        route(_ONE, _delete, "DELETE"),
        route(f"{_ONE}/cancel", _cancel, "POST"),
        route(f"{_ONE}/input_items", _input_items, "GET"),
    )


async def _read(services: Services, request: Request, owner: str) -> Response:
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise refusal("stored responses cannot be streamed; leave stream out of the query", "stream")
    return counted_response(request, (await _found(services, request, owner)).response)


async def _delete(services: Services, request: Request, owner: str) -> Response:
    response_id = request.path_params["id"]
    row = await background.cancel(services, response_id, owner)
    if row is None:
        raise _not_found(response_id)
    await services.store.run(lambda connection: table.delete(connection, response_id, owner))
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _cancel(services: Services, request: Request, owner: str) -> Response:
    row = await _found(services, request, owner)
    if row.worker is None:
        raise refusal(
            f"{row.id!r:.80} is no background response; only those can be cancelled. To cancel another one, close its "
            "connection",
            "id",
        )
    cancelled = await background.cancel(services, row.id, owner)
    if cancelled is None:
        raise _not_found(row.id)
    return counted_response(request, cancelled.response)


async def _input_items(services: Services, request: Request, owner: str) -> Response:
    query = page_query(request, default_limit=20, max_limit=_MOST_ITEMS)
    row = await _found(services, request, owner)
    # In a thread: the items may have megabytes.
    return counted_response(request, await asyncio.to_thread(_page, row.input, query))


def _page(content: bytes, query: PageQuery) -> bytes:
    ids = [one.id for one in msgspec.json.decode(content, type=list[_Id])]
    items = msgspec.json.decode(content, type=list[msgspec.Raw])
    if query.order == "desc":
        ids, items = ids[::-1], items[::-1]
    start = 0
    if query.after is not None:
        if query.after not in ids:
            raise refusal(f"after is {query.after!r:.80}, which is not the id of an input item", "after")
        start = ids.index(query.after) + 1
    end = start + query.limit
    return msgspec.json.encode(list_object(items[start:end], ids[start:end], has_more=len(ids) > end))


class _Id(msgspec.Struct):
    id: str


async def _found(services: Services, request: Request, owner: str) -> table.StoredResponse:
    """The stored response of the route. Counts its bytes against the budget for answers. Raises a 404 if there is none."""
    response_id: str = request.path_params["id"]
    row = await background.read_state(services, response_id, owner)
    if row is None:
        raise _not_found(response_id)
    count_bytes(request, row.num_bytes)
    return row


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404, f"there is no stored response {response_id!r:.80}", param="id", code="response_not_found"
    )
