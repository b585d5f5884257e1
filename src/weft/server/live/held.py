"""The part of a live frame that the server adds: the API keys of requests, and requests not yet in the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from weft.live import MAX_REQUESTS
from weft.request import RequestId

if TYPE_CHECKING:
    from weft.server.admission.active_requests import ActiveRequest


class HeldRequest(NamedTuple):
    """An active request with answers that were not yet sent to the engine."""

    request_id: RequestId
    key: str | None
    state: str
    """preparing: the server tokenises its prompt. held: `FairGate` has not released all of its answers."""
    priority: int | None
    """The number of the priority of the request. None while the server prepares it."""
    age: float
    """Seconds since the body of the request arrived."""
    num_answers: int
    """Answers that `FairGate` has not released. 0 while the server prepares the request."""
    prompt_tokens: int | None
    """Tokens of all its prompts. None while the server prepares the request."""
    left: float | None
    """Seconds until its deadline. None: it has none, or its body is not yet read."""


class RequestsOfServer(NamedTuple):
    """The part of a frame that describes the active requests of the server."""

    keys: dict[RequestId, str]
    """Request id -> name of its API key. At most `MAX_REQUESTS` entries, those of the oldest requests."""
    held: list[HeldRequest]
    """The oldest held requests, at most `MAX_REQUESTS`."""
    num_held: int
    """The number of held requests, including those that `held` leaves out."""
    num_open: int
    """The number of active requests, in the engine or not."""


def requests_of_server(active_requests: Iterable[ActiveRequest], now: float) -> RequestsOfServer:
    keys: dict[RequestId, str] = {}
    held: list[HeldRequest] = []
    num_held = num_open = 0
    for one in active_requests:
        num_open += 1
        key = None if one.key is None else one.key.name
        num_waiting = 0 if one.ticket is None else one.ticket.num_waiting
        if one.requests and key is not None and len(keys) < MAX_REQUESTS:
            keys[one.id] = key
        if one.requests and not num_waiting:
            continue
        num_held += 1
        if len(held) < MAX_REQUESTS:
            age = round(now - one.began, 3)
            left = None if one.deadline is None else round(one.deadline - age, 3)
            if one.requests:
                priority = int(one.requests[0].priority)
                held.append(
                    HeldRequest(one.id, key, "held", priority, age, num_waiting, one.prompt_tokens, left)
                )
            else:
                held.append(HeldRequest(one.id, key, "preparing", None, age, 0, None, left))
    return RequestsOfServer(keys, held, num_held, num_open)
