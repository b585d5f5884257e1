"""What the routes for stored objects share: the owner of a request, and lists that clients read page by page."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from weft.server.admission.keys import ApiKey
from weft.server.errors import ApiError
from weft.server.http.scope import KEY
from weft.server.state.paging import PageQuery


def owner_of(request: Request) -> str:
    """The owner of what the request makes, and the only owner whose objects it sees."""
    key: ApiKey | None = request.scope[KEY]
    return "" if key is None else key.owner


def page_query(request: Request, *, default_limit: int, max_limit: int) -> PageQuery:
    """The page that the query of a URL asks for."""
    given = request.query_params
    text, order = given.get("limit", str(default_limit)), given.get("order", "desc")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= max_limit:
        message = f"limit is {text!r:.80}; allowed: 1 to {max_limit}"
        raise ApiError(400, message, param="limit", code="invalid_value")
    if order == "asc":
        return PageQuery(limit, "asc", given.get("after") or None)
    if order == "desc":
        return PageQuery(limit, "desc", given.get("after") or None)
    raise ApiError(400, f"order is {order!r:.80}; allowed: asc, desc", param="order", code="invalid_value")


def page_response(found: tuple[list[dict[str, Any]], bool] | None, query: PageQuery) -> dict[str, Any]:
    """The list object. `found` is None if there is no object `query.after`."""
    if found is None:
        message = f"after is {query.after!r:.80}; there is no such object"
        raise ApiError(404, message, param="after", code="not_found")
    data, has_more = found
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
