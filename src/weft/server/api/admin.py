"""The routes of operators: list and cancel the active requests. `Guard` has checked the admin key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response

_ACCESS = "Needs an admin key, or a server without keys on a loopback address."

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/admin/requests"): Operation(
        "List active requests", _ACCESS, "Administration", dict, errors=(403,)
    ),
    ("delete", "/admin/requests/{id}"): Operation(
        "Cancel a request", _ACCESS, "Administration", dict, errors=(403, 404)
    ),
}


def routes(services: Services) -> Sequence[Route]:
    return [
        Route("/admin/requests", partial(_list, services), methods=["GET"]),
        Route("/admin/requests/{id}", partial(_cancel, services), methods=["DELETE"]),
    ]


async def _list(services: Services, request: Request) -> Response:
    return json_response({"object": "list", "data": services.active_requests.described()})


async def _cancel(services: Services, request: Request) -> Response:
    name = request.path_params["id"]
    if not services.active_requests.cancel(name):
        message = f"there is no active request {name!r:.80}; GET /admin/requests lists the active ones"
        raise ApiError(404, message, code="request_not_found")
    return json_response({"id": name, "object": "request", "cancelled": True})
