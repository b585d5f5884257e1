"""Handles requests that generate nothing, from their body to their response: text work, vectors and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from weft.server.admission.active_requests import ActiveRequest, ActiveRequests
from weft.server.admission.keys import ApiKey
from weft.server.errors import ApiError, json_response, renamed_fields, warning_header
from weft.server.http.bodies import BodyReader, read_body
from weft.server.http.byte_budget import RequestBytes
from weft.server.http.scope import ANSWER, BODY, KEY
from weft.server.internal import INTERNAL, InternalRequest
from weft.server.logs import current_record
from weft.server.stream.choices import Choices
from weft.server.stream.events import Disconnected, unless_disconnected
from weft.server.stream.loop_turns import LoopTurns

ITSELF = " server"
"""The client of requests that the server sends to itself. No key has this name."""

T = TypeVar("T", bound=Any)
R = TypeVar("R")


@dataclass(frozen=True)
class PlainRequest(Generic[T]):
    """One request whose body is parsed."""

    fields: T
    size: int
    """Bytes of the body of the request."""
    active: ActiveRequest
    client_id: str
    body_bytes: RequestBytes
    answer_bytes: RequestBytes


class Admission(Protocol):
    """What `PlainRequests` needs of the server. `weft.server.app.ServerApp` implements it."""

    def check_not_draining(self) -> None: ...

    def new_choices(self) -> Choices: ...


class PlainRequests:
    """Belongs to one event loop."""

    def __init__(
        self, admission: Admission, active_requests: ActiveRequests, bodies: BodyReader, loop_turns: LoopTurns
    ) -> None:
        self.active_requests = active_requests
        self.loop_turns = loop_turns
        self._admission = admission
        self._bodies = bodies

    async def handle(
        self, request: Request, kind: type[T], work: Callable[[PlainRequest[T]], Coroutine[Any, Any, Any]]
    ) -> Response:
        """Runs `work`, which returns the JSON of the response, or the response. The request is an active request, and
        uses the limits of its key. `work` is cancelled if the client disconnects, at the deadline, and if an operator
        cancels the request."""
        key: ApiKey | None = request.scope[KEY]
        internal: InternalRequest | None = request.scope.get(INTERNAL)
        is_idle_work = internal is not None and internal.is_idle_work
        self._admission.check_not_draining()
        if not is_idle_work:
            self.active_requests.check_capacity(key)
        body = await read_body(request)
        choices = self._admission.new_choices()
        record, client = current_record(), client_id(request)
        active = self.active_requests.begin(
            key, choices, record.id, record.given_id, is_idle_work=is_idle_work
        )
        try:
            await self.loop_turns.wait()
            with renamed_fields({}):  # converts each WeftError to an ApiError
                fields, unknown = await unless_disconnected(
                    request.receive, self._bodies.read(kind, body, client)
                )
                self.active_requests.set_deadline(active, getattr(fields, "deadline", None))
                plain = PlainRequest(
                    fields, len(body), active, client, request.scope[BODY], request.scope[ANSWER]
                )
                del body
                content = await unless_disconnected(request.receive, _unless_failed(choices, work(plain)))
            self.active_requests.end(active, [])
            response = content if isinstance(content, Response) else json_response(content)
            response.headers.update(warning_header(unknown) | active.headers)
            return response
        except ApiError as error:
            self.active_requests.end(active, error)
            error.headers |= active.headers
            raise
        except Disconnected:
            record.is_client_gone = True
            self.active_requests.end(active, None)
            raise
        finally:
            # Has no effect if the request ended above.
            self.active_requests.end(active, ApiError.internal_error())


async def _unless_failed(choices: Choices, work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`. If `Choices.fail` is called while `work` runs, cancels it and raises that error."""
    working, failed = asyncio.ensure_future(work), asyncio.ensure_future(choices.wait())
    try:
        await asyncio.wait((working, failed), return_when=asyncio.FIRST_COMPLETED)
        choices.check()
        return working.result()
    finally:
        working.cancel()
        failed.cancel()
        await asyncio.wait((working, failed))
        del working, failed  # an error has a traceback that refers to this frame: a reference cycle


def client_id(request: Request) -> str:
    """Identifies the client for fair sharing: the name of its key, or its address if there are no keys. The server itself
    is one client."""
    key: ApiKey | None = request.scope[KEY]
    if INTERNAL in request.scope:
        return ITSELF
    if key is not None:
        return key.name
    return request.client.host if request.client is not None else ""
