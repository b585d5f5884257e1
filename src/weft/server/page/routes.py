"""Serves the files of the page. The page loads nothing from other hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.services import Services
from weft.server.http.scope import OLLAMA_PORT

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The browser refuses text that would be parsed as HTML, such as an assignment to innerHTML.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The browser asks each time whether its copy is the newest one, so a new version of weft is shown at once.
    "Cache-Control": "no-cache",
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/"): Operation(
        "The page with a chat and the live view",
        "",
        "Operating",
        None,
        media_type="text/html",
        is_open=True,
    )
}


def routes(services: Services) -> Sequence[Route]:
    return page_routes()


def page_routes() -> Sequence[Route]:
    """The routes without `Services`: the server of a replay has none."""
    return [
        Route("/", _root, methods=["GET"]),
        Route("/page/{name}", _file, methods=["GET"], include_in_schema=False),
    ]


async def _root(request: Request) -> Response:
    # Ollama's clients request `/` to see whether the server runs.
    if request.scope.get(OLLAMA_PORT):
        return PlainTextResponse("Ollama is running")
    return _response("index.html", request)


async def _file(request: Request) -> Response:
    return _response(request.path_params["name"], request)


@cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)


def _response(name: str, request: Request) -> Response:
    if name not in _names():
        raise HTTPException(404)
    path = FOLDER / name
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[path.suffix])
