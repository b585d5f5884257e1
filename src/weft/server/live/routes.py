"""The routes of live data. `Guard` has checked the admin key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.server.api.answer_format import Operation
from weft.server.api.services import Services
from weft.server.errors import ApiError, json_response, refusal
from weft.server.live.feed import MAX_VIEWERS, LiveFeed
from weft.server.live.info import live_info
from weft.server.stream.events import Disconnected, unless_disconnected

_MAX_FRAMES = 1_000_000
_ACCESS = "Needs an admin key, or a server without keys on a loopback address."
_FRAMES = {
    "type": "integer",
    "minimum": 1,
    "maximum": _MAX_FRAMES,
    "description": "End after this many frames.",
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/live/info"): Operation(
        "Describe the engine for the live view", _ACCESS, "Operating", dict, errors=(403,)
    ),
    ("get", "/live"): Operation(
        "Stream what the engine does: its batch, queue and KV blocks",
        f"At most ten events a second, and {MAX_VIEWERS} streams. {_ACCESS}",
        "Operating",
        None,
        media_type="text/event-stream",
        errors=(400, 403, 429, 503),
        query={"frames": _FRAMES},
    ),
    ("get", "/live/requests/{id}"): Operation(
        "Show the prompt of a running request",
        f"Only if `show_prompts` is set. {_ACCESS}",
        "Operating",
        dict,
        errors=(403, 404),
    ),
}


def routes(services: Services) -> Sequence[Route]:
    return [
        Route("/live", partial(_live, services), methods=["GET"]),
        Route("/live/info", partial(_info, services), methods=["GET"]),
        Route("/live/requests/{id}", partial(_text, services), methods=["GET"]),
    ]


async def _info(services: Services, request: Request) -> Response:
    info = services.engine.live_info
    assert info is not None, "the engine was started before the server"
    settings = services.settings
    return json_response(live_info("live", settings.names[0], info, show_prompts=settings.show_prompts))


async def _live(services: Services, request: Request) -> Response:
    given = request.query_params.get("frames")
    return LiveStream(services.live, None if given is None else _number(given))


def _number(text: str) -> int:
    # Longer numbers are too large, and slow to read.
    if not (text.isascii() and text.isdecimal() and len(text) <= 7 and 1 <= int(text) <= _MAX_FRAMES):
        raise refusal(f"frames is {text!r:.40}; allowed: 1 to {_MAX_FRAMES}", "frames")
    return int(text)


async def _text(services: Services, request: Request) -> Response:
    if not services.settings.show_prompts:
        message = "the server shows no prompts; set show_prompts to allow it"
        raise ApiError(403, message, code="prompts_hidden")
    name = request.path_params["id"]
    found = services.active_requests.prompt_of(name)
    if found is None:
        message = f"there is no running request {name!r:.80}"
        raise ApiError(404, message, code="request_not_found")
    return json_response({"id": name, "prompt": await services.text_of(found)})


class LiveStream(Response):
    """Sends the newest frame, again and again, as fast as the viewer reads and no faster than frames are made."""

    def __init__(self, feed: LiveFeed, num_frames: int | None) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._feed = feed
        self._num_frames = num_frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Disconnected):
            await unless_disconnected(receive, self._send_frames(send))

    async def _send_frames(self, send: Send) -> None:
        with self._feed.viewer() as viewer:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            num_sent = 0
            while num_sent != self._num_frames and (frame := await viewer.take()) is not None:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                num_sent += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})
