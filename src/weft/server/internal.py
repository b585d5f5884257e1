"""Requests that the server sends to itself: lines of batches and background responses.

They are handled like the requests of clients, so limits, log and metrics apply to them. Only the checks of the guard
are left out: the key is known, and there is no connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from weft.request import RequestId
from weft.server.admission.keys import ApiKey

INTERNAL = "weft.internal"
"""Scope entry with the `InternalRequest`. No client can set it."""


@dataclass(frozen=True)
class InternalReply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True)
class InternalRequest:
    """The key and the id of an internal request, and how it runs."""

    key: ApiKey | None
    request_id: RequestId | None = None
    """The id of the request. None: it gets a new one."""
    is_idle_work: bool = False
    """The request uses only the capacity that the requests of clients leave."""


async def send_internal(app: ASGIApp, path: str, body: bytes, request: InternalRequest) -> InternalReply:
    """Sends a POST and returns the whole response. If the caller is cancelled, the request is cancelled."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    del body  # so that the body is freed when the app has read it
    sent: list[Message] = []

    async def receive() -> Message:
        # A new future for each call: a caller that is cancelled also cancels the future that it awaits.
        return parts.pop() if parts else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        INTERNAL: request,
    }
    await app(scope, receive, send)
    start = sent[0]
    return InternalReply(
        start["status"], dict(start["headers"]), b"".join(one.get("body", b"") for one in sent[1:])
    )
