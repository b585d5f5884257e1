"""The routes of operators: list and cancel active requests, show and delete what was learned. `Guard` has checked the
admin key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response


class LearnedEntry(Shape):
    kind: Annotated[
        Literal["costs", "drafts", "texts"],
        Meta(
            description="costs: seconds of steps, kept in the store; drafts: finished answers in memory; texts: finished "
            "answers in the store."
        ),
    ]
    name: Annotated[
        str | None,
        Meta(description="costs: the model and the machine; texts: the key; null: the running engine."),
    ]
    created_at: int | None
    updated_at: int | None
    bytes: int
    step_seconds: Annotated[
        float | None, Meta(description="costs: the mean seconds of a step that decodes, as it was learned.")
    ]
    costs: Annotated[
        dict[str, Any] | None,
        Meta(
            description="costs: the sums that were learned. `weft profile --url` makes a machine profile of them."
        ),
    ]
    tokens: Annotated[int | None, Meta(description="drafts: tokens of finished answers.")]
    answers: Annotated[int | None, Meta(description="texts: the number of answers.")]
    tokens_saved: Annotated[
        int | None, Meta(description="drafts: tokens that were accepted since the engine started.")
    ]
    seconds_saved: Annotated[float | None, Meta(description="drafts: an estimate since the engine started.")]


class LearnedList(Shape):
    object: Literal["list"]
    data: list[LearnedEntry]


class LearnedDeleted(Shape):
    object: Literal["learned.deleted"]
    deleted: bool
    entries: int


_ACCESS = "Needs an admin key, or a server without keys on a loopback address."

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/admin/requests"): Operation(
        "List active requests", _ACCESS, "Administration", dict, errors=(403,)
    ),
    ("delete", "/admin/requests/{id}"): Operation(
        "Cancel a request", _ACCESS, "Administration", dict, errors=(403, 404)
    ),
    ("get", "/admin/learned"): Operation(
        "Show what the server has learned",
        f"Costs of steps, by model and machine; finished answers for draft tokens, in memory and kept. {_ACCESS}",
        "Administration",
        LearnedList,
        errors=(403, 503),
    ),
    ("delete", "/admin/learned"): Operation(
        "Forget what was learned",
        f"The costs of steps, in the store and in the engine, and finished answers. {_ACCESS}",
        "Administration",
        LearnedDeleted,
        errors=(403, 503),
    ),
}


def routes(services: Services) -> Sequence[Route]:
    return [
        Route("/admin/requests", partial(_list, services), methods=["GET"]),
        Route("/admin/requests/{id}", partial(_cancel, services), methods=["DELETE"]),
        Route("/admin/learned", partial(_show_learned, services), methods=["GET"]),
        Route("/admin/learned", partial(_clear_learned, services), methods=["DELETE"]),
    ]


async def _list(services: Services, request: Request) -> Response:
    return json_response({"object": "list", "data": services.active_requests.described()})


async def _cancel(services: Services, request: Request) -> Response:
    name = request.path_params["id"]
    if not services.active_requests.cancel(name):
        message = f"there is no active request {name!r:.80}; GET /admin/requests lists the active ones"
        raise ApiError(404, message, code="request_not_found")
    return json_response({"id": name, "object": "request", "cancelled": True})


async def _show_learned(services: Services, request: Request) -> Response:
    nothing = dict.fromkeys(LearnedEntry.__struct_fields__)
    entries: list[dict[str, Any]] = [
        {
            **nothing,
            "kind": "costs",
            "name": row.name,
            "created_at": int(row.created_at),
            "updated_at": int(row.updated_at),
            "bytes": len(row.content),
            "step_seconds": costs.mean_seconds or None,
            "costs": msgspec.to_builtins(costs),
        }
        for row, costs in await services.learned.rows()
    ]
    figures = await services.engine.metrics()
    totals = figures.totals
    entries.append(
        {
            **nothing,
            "kind": "drafts",
            "bytes": figures.learned_bytes,
            "tokens": figures.learned_tokens,
            "tokens_saved": totals.learned_drafts_accepted,
            "seconds_saved": totals.learned_seconds_saved,
        }
    )
    entries += [
        {
            **nothing,
            "kind": "texts",
            "name": owner,
            "created_at": int(created_at),
            "updated_at": int(updated_at),
            "bytes": num_bytes,
            "answers": count,
        }
        for owner, count, num_bytes, created_at, updated_at in await services.learned.texts()
    ]
    return json_response({"object": "list", "data": entries})


async def _clear_learned(services: Services, request: Request) -> Response:
    count = await services.learned.clear()
    return json_response({"object": "learned.deleted", "deleted": True, "entries": count})
