"""The outermost middleware: gives each request its id, and logs the request when it ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.request import REQUEST_ID_PATTERN, RequestId
from weft.server.api.formats import Formats
from weft.server.errors import ApiError
from weft.server.http.scope import RECORD
from weft.server.internal import INTERNAL, InternalRequest
from weft.server.logs import QUIET_PATHS, Record, ServerLog, record_of_task
from weft.server.traces import Traces

_LONGEST_PATH = 200


class AccessLog:
    """Logs requests. Also catches unexpected exceptions of the application: sends a 500 and logs where they were
    raised."""

    def __init__(
        self,
        app: ASGIApp,
        log: ServerLog,
        new_id: Callable[[], RequestId],
        on_error: Callable[[int], object] = lambda status: None,
        traces: Traces | None = None,
        formats: Formats = MappingProxyType({}),
    ) -> None:
        """`new_id` makes the ids of requests. `on_error` is called with the status of each request that ended with an
        error status. `traces` gets each request that ended. `formats` may name more response headers for the id."""
        self._app = app
        self._new_id = new_id
        self._log = log
        self._on_error = on_error
        self._traces = traces
        self._id_headers = [(one.client_header, one.id_header) for one in formats.values() if one.id_header]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no lifespan events and no websockets
        headers: dict[bytes, bytes] = dict(scope["headers"])
        internal: InternalRequest | None = scope.get(INTERNAL)
        request_id = (internal.request_id if internal is not None else None) or self._new_id()
        record = Record(scope["method"], scope["path"][:_LONGEST_PATH], request_id, _given_id(headers))
        scope[RECORD] = record
        id_headers = ("x-request-id", *(name for sent, name in self._id_headers if sent in headers))
        token = record_of_task.set(record)

        # Not a coroutine, which would cost time for every message of a stream. Only the first message is recorded.
        def send_recorded(message: Message) -> Any:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                for name in id_headers:
                    MutableHeaders(scope=message)[name] = record.request_id
            return send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception as error:
            self._log_exception(error, record)
            if not record.status:
                await ApiError.internal_error().response(scope)(scope, receive, send_recorded)
        finally:
            record_of_task.reset(token)
            key = scope.get("weft.key")  # set by the guard
            record.key_name = None if key is None else key.name
            # The queue of the log may keep the record for long. It must not keep the request too.
            active, record.active = record.active, None
            self._log.request(record)
            if record.status >= 400 and not record.is_client_gone and record.path not in QUIET_PATHS:
                self._on_error(record.status)
            if self._traces is not None:
                self._traces.end(record, active, scope)

    def _log_exception(self, error: Exception, record: Record) -> None:
        """Logs the frames of the exception. Its message is not logged, because it may quote the request."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        message = f"{type(error).__name__} while answering {record.request_id}"
        self._log.event("mistake", message, "error", request_id=record.request_id, traceback=frames)


def _given_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The id that the client sent, if it is valid."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID_PATTERN.fullmatch(given) else None
