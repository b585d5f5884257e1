"""What the routes for stored objects share: the owner of a request, and lists that clients read page by page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server.api.response_shapes import Shape
from weft.server.api.services import owner_of_key
from weft.server.errors import ApiError, refusal
from weft.server.http.byte_budget import RequestBytes
from weft.server.http.scope import ANSWER, KEY
from weft.server.state.paging import PageQuery
from weft.server.stream.whole_answer import PartsResponse

T = TypeVar("T")


class Page(Shape):
    """Base of the types of lists. They add `data`."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


def owner_of(request: Request) -> str:
    """The owner of a request: the objects that it makes belong to this owner, and it finds no others."""
    return owner_of_key(request.scope[KEY])


def count_bytes(request: Request, num_bytes: int) -> None:
    """Counts bytes that were read from the store against the budget for answers, like those of a generated answer. Raises
    ApiError if the budget is exceeded."""
    answer_bytes: RequestBytes = request.scope[ANSWER]
    answer_bytes.add(num_bytes)


def counted_response(request: Request, content: bytes) -> Response:
    """A response with JSON that may have megabytes. Its bytes count against the budget until the client has read them."""
    answer_bytes: RequestBytes = request.scope[ANSWER]
    answer_bytes.keep(len(content))
    return PartsResponse(deque([content]), answer_bytes, {})


def counted_list(request: Request, content: Any) -> Response:
    return counted_response(request, msgspec.json.encode(content))


def checked_number(text: str, param: str, least: int, most: int) -> int:
    """Parses a number that a client sent as text. Raises ApiError if it is out of range."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not least <= number <= most:
        raise refusal(f"{param} is {text!r:.80}; allowed: {least} to {most}", param)
    return number


def page_query(request: Request, *, default_limit: int, max_limit: int) -> PageQuery:
    """The page that the query of a URL asks for."""
    given = request.query_params
    limit = checked_number(given.get("limit", str(default_limit)), "limit", 1, max_limit)
    order: Any = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refusal(f"order is {order!r:.80}; allowed: asc, desc", "order")
    return PageQuery(limit, order, given.get("after") or None)


def page_parameters(max_limit: int) -> dict[str, dict[str, Any]]:
    """The parameters that `page_query` reads, as JSON schemas for the OpenAPI document."""
    return {
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": max_limit,
            "description": "Maximum number of objects on a page.",
        },
        "order": {
            "type": "string",
            "enum": ["asc", "desc"],
            "default": "desc",
            "description": "asc: oldest first; desc: newest first.",
        },
        "after": {"type": "string", "description": "The last id of the page before."},
    }


def page_response(
    found: tuple[list[T], bool] | None, query: PageQuery, described: Callable[[T], dict[str, Any]]
) -> dict[str, Any]:
    """The list object. `found` is None if there is no object `query.after`."""
    if found is None:
        message = f"after is {query.after!r:.80}; there is no such object"
        raise ApiError(404, message, param="after", code="not_found")
    data = [described(one) for one in found[0]]
    return list_object(data, [one["id"] for one in data], has_more=found[1])


def list_object(data: Sequence[Any], ids: Sequence[str], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
