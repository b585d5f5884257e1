"""Background responses: a task for each, which sends its request to the server itself and waits for the end.

    POST, background: true -> row `queued`, task
    task -> POST to the server itself, with the same id -> row `in_progress` -> row `completed` or `incomplete`
         `-> failed or refused -> row `failed`

The request is handled like any other, so limits, fairness, log and metrics apply to it. While the server has no room
for it (429, 503), the task waits and tries again. The row has the state (`server/state/responses.py`); the task owns
nothing. After a restart nothing is run again: the first reader sees that the worker of the row has ended, and changes it
to `failed`. The client may have sent its request again by then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import WeftError
from weft.server.errors import ApiError, as_api_error
from weft.server.internal import InternalReply, InternalRequest
from weft.server.state import responses as table

if TYPE_CHECKING:
    from weft.server.api.services import Caller, Services

_PATH = "/v1/responses"
_WAIT_CODES = frozenset({"engine_not_ready", "server_busy"})
"""Codes of a 503 after which the request is sent again, because it has not begun."""
_LONGEST_WAIT = 30.0
_GIVE_UP_SECONDS = 86400.0
"""A background response fails after the server has refused its request for this long."""
_STOPPED = "the server stopped before the response was complete; send the request again"


async def begin_background(caller: Caller, row: table.StoredResponse) -> None:
    """Stores a queued response, and starts its task."""
    services, store = caller.services, caller.services.store
    services.tasks.check_capacity(caller.owner)
    row = dataclasses.replace(row, worker=store.process_lock.name)

    def add(connection: Any) -> None:
        store.process_lock.begin()
        table.insert(connection, row, caller.owner, store.wall_clock(), table.keeping(services.settings))

    await store.run(add)
    services.tasks.start(row.id, caller.owner, _run(caller, row.id))


async def take_over(caller: Caller, response_id: str) -> float:
    """Changes the status of a queued response to in_progress. Returns the time of its creation."""
    store = caller.services.store

    def change(connection: Any) -> float:
        row = table.find(connection, response_id, caller.owner, store.wall_clock())
        if row is None or row.is_finished:
            raise ApiError(409, f"the response {response_id!r:.80} was cancelled", code="cancelled")
        response = with_fields(row.response, status="in_progress")
        table.change_unfinished(connection, row.id, caller.owner, "in_progress", response)
        return row.created_at

    return await store.run(change)


async def read_state(services: Services, response_id: str, owner: str) -> table.StoredResponse | None:
    """A stored response. A response in the background becomes `failed` if the server process that began it has ended. It
    also becomes `failed` if its task has ended without storing a result, for example because the disk was full."""
    store = services.store
    is_own_task = response_id in services.tasks

    def read(connection: Any) -> table.StoredResponse | None:
        row = table.find(connection, response_id, owner, store.wall_clock())
        if row is None or row.is_finished:
            return row
        if is_own_task if row.worker == store.process_lock.name else store.process_lock.is_alive(row.worker):
            return row
        return _end(connection, row, owner, "failed", failure(503, None, _STOPPED))

    return await store.run(read)


async def cancel(services: Services, response_id: str, owner: str) -> table.StoredResponse | None:
    """Cancels a background response, and returns it. A response that has ended is not changed. None: there is no response
    with this id."""
    store = services.store

    def change(connection: Any) -> table.StoredResponse | None:
        row = table.find(connection, response_id, owner, store.wall_clock())
        return row if row is None or row.is_finished else _end(connection, row, owner, "cancelled")

    row = await store.run(change)
    if row is not None:
        await services.tasks.cancel(row.id)
    return row


def with_fields(response: bytes, **fields: Any) -> bytes:
    """A response object with other values for some fields."""
    content = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**content, **fields})


def _end(
    connection: Any, row: table.StoredResponse, owner: str, status: str, error: dict[str, str] | None = None
) -> table.StoredResponse:
    """Gives a response in the store its final status. Returns the changed row."""
    response = with_fields(row.response, status=status, error=error)
    table.change_unfinished(connection, row.id, owner, status, response)
    return dataclasses.replace(row, status=status, response=response, request=None)


async def _run(caller: Caller, response_id: str) -> None:
    """Runs as the task of one response. If its request fails, the row becomes `failed`, unless it has a final status."""
    found = failure(503, None, _STOPPED)
    try:
        found = await _send(caller, response_id)
    except WeftError as error:
        found = failure(500, None, as_api_error(error).message)
    finally:
        if found:
            await _fail(caller, response_id, found)


async def _fail(caller: Caller, response_id: str, error: dict[str, str]) -> None:
    store = caller.services.store

    def change(connection: Any) -> None:
        row = table.find(connection, response_id, caller.owner, store.wall_clock())
        if row is not None and not row.is_finished:
            _end(connection, row, caller.owner, "failed", error)

    await store.run(change)


async def _send(caller: Caller, response_id: str) -> dict[str, str]:
    """Sends the request until the server accepts it. Returns the error, or {}."""
    services, store = caller.services, caller.services.store
    request = InternalRequest(caller.key, caller.request_id)
    give_up_at, wait = time.monotonic() + _GIVE_UP_SECONDS, 0.2
    while True:
        row = await store.run(
            lambda connection: table.find(connection, response_id, caller.owner, store.wall_clock())
        )
        if row is None or row.is_finished:
            return {}
        sending = services.send_internal(_PATH, row.request or b"", request)
        del row  # it may have megabytes
        reply = await sending
        if reply.status == 200:
            return {}
        error = _error_of(reply)
        may_wait = reply.status == 429 or (reply.status == 503 and error.get("code") in _WAIT_CODES)
        if not may_wait or time.monotonic() > give_up_at:
            return failure(reply.status, error.get("code"), str(error.get("message")))
        given = reply.headers.get(b"retry-after", b"")
        await asyncio.sleep(min(max(float(given) if given.isdigit() else 0.0, wait), _LONGEST_WAIT))
        wait *= 2


def _error_of(reply: InternalReply) -> dict[str, Any]:
    try:
        error: dict[str, Any] = msgspec.json.decode(reply.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": f"the server answered with the status {reply.status}"}
    return error


def failure(status: int, code: str | None, message: str) -> dict[str, str]:
    """The error of a failed response. Clients know the codes of the OpenAI API; `context_length_exceeded` is one that
    Codex acts on."""
    if code != "context_length_exceeded":
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(status, "server_error")
    return {"code": code, "message": message}
