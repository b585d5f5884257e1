"""The server of `weft replay --show`: the page, and the frames of an event log. It has no model and no engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.live import LiveInfo
from weft.request import RequestId
from weft.server.errors import ApiError, json_response, refusal
from weft.server.http.guard import Guard
from weft.server.http.listener import Listener
from weft.server.live.info import REPLICA, live_info
from weft.server.page.routes import page_routes
from weft.server.settings import ServerSettings

MAX_FRAMES = 256
"""Maximum frames in one response."""
_HOST = "127.0.0.1"


class Frames(Protocol):
    """The frames of a log. More are added until `is_complete`."""

    path: str
    info: LiveInfo
    is_complete: bool
    problem: str | None

    @property
    def num_frames(self) -> int: ...

    @property
    def progress(self) -> float: ...

    def read(self, start: int, count: int) -> Sequence[bytes]: ...

    def events_of(self, request_id: RequestId, until: int) -> tuple[Sequence[bytes], int]: ...

    def next_preemption(self, after: int) -> int | None: ...

    def overview(self) -> dict[str, object]: ...


def serve_replay(frames: Frames, name: str, port: int, on_start: Callable[[str], object]) -> None:
    """Serves until a signal arrives. `on_start` is called with the address of the page."""
    asyncio.run(_serve(frames, name, ServerSettings(host=_HOST, port=port), on_start))


async def _serve(
    frames: Frames, name: str, settings: ServerSettings, on_start: Callable[[str], object]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = Listener(settings)
    await listener.bind(settings.port, "--port")
    (port,) = await listener.accept([Guard(_app(frames, name), settings, {})])
    on_start(f"http://{_HOST}:{port}/")
    await stop.wait()
    await listener.close()


def _app(frames: Frames, name: str) -> Starlette:
    # These fields are put before the fields of each frame, so the closing brace is cut off here.
    head = msgspec.json.encode(
        {"model": name, "replica": REPLICA, "engine": "ready", "keys": {}, "held": [], "num_held": 0}
    )[:-1]

    async def info(request: Request) -> Response:
        return json_response(_info(frames, name))

    async def some_frames(request: Request) -> Response:
        start = _parameter(request, "start", 0, frames.num_frames - 1)
        count = _parameter(request, "count", 1, MAX_FRAMES)
        found = [head + b"," + frame[1:] for frame in frames.read(start, count)]
        return Response(b"[" + b",".join(found) + b"]", media_type="application/json")

    async def events_of_request(request: Request) -> Response:
        until = _parameter(request, "until", 0, frames.num_frames - 1)
        found, num_left_out = frames.events_of(RequestId(request.path_params["id"]), until)
        content = b'{"events":[%b],"left_out":%d}' % (b",".join(found), num_left_out)
        return Response(content, media_type="application/json")

    async def preemption(request: Request) -> Response:
        after = _parameter(request, "after", 0, frames.num_frames - 1)
        return json_response({"frame": frames.next_preemption(after)})

    async def overview(request: Request) -> Response:
        return json_response(frames.overview())

    routes = [
        *page_routes(),
        Route("/live/info", info),
        Route("/replay/frames", some_frames),
        Route("/replay/requests/{id}", events_of_request),
        Route("/replay/preemption", preemption),
        Route("/replay/overview", overview),
    ]
    handlers = {ApiError: _respond_with_error, HTTPException: _respond_with_http_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _info(frames: Frames, name: str) -> dict[str, object]:
    # Read before the number of frames: if the replay is complete, that number is the final one.
    is_complete = frames.is_complete
    return {
        **live_info("replay", name, frames.info),
        "path": frames.path,
        "num_frames": frames.num_frames,
        "is_complete": is_complete,
        "progress": frames.progress,
        "problem": frames.problem,
    }


def _parameter(request: Request, name: str, least: int, most: int) -> int:
    text = request.query_params.get(name, "")
    # A number of more than 18 digits is out of range. It is refused first, because int() is slow for very long texts.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and least <= int(text) <= most):
        allowed = f"{least} to {most}" if least <= most else "none: there are no frames yet"
        raise refusal(f"{name} is {text!r:.40}; allowed: {allowed}", name)
    return int(text)


async def _respond_with_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def _respond_with_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: a replay has no route {request.method} {request.url.path!r:.200}"
    return ApiError(error.status_code, message, headers=error.headers).response(request.scope)
