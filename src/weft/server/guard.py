"""Who may ask, and how much: Host and Origin, API keys, the size of bodies. Decided before anything is read or run."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.errors import ApiError
from weft.server.settings import ServerSettings

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_OPEN_PATHS = frozenset({"/health"})


class Guard:
    """Stands before every route."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_body_bytes
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._origins = frozenset(settings.allowed_origins)
        self._is_loopback = is_loopback(settings.host)
        self._own_name = settings.host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither lifespan nor websockets
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._check_host(headers.get(b"host"))
        self._check_origin(headers.get(b"origin"), headers.get(b"host"))
        if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers.get(b"authorization", b""))
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_body_bytes:
            raise self._too_large(f"{int(length)} bytes")

    def _check_host(self, host: bytes | None) -> None:
        """A page that lets its name point at this machine has the browser's leave to call it; not ours."""
        if host is None:
            return  # HTTP/1.0
        found = _HOST.fullmatch(host.decode("latin-1"))
        if found is None:
            raise ApiError(400, "the Host header is not a host and a port", code="invalid_host")
        name = found["name"].lower()
        if self._is_loopback and not (name == self._own_name or is_loopback(name)):
            raise ApiError(
                403,
                f"the Host header names {name!r:.80}; this server answers to this machine alone, as localhost. "
                "Start it with --host to serve others",
                code="forbidden_host",
            )

    def _check_origin(self, origin: bytes | None, host: bytes | None) -> None:
        """A browser says which page a request is from; a page of somebody else has no business on a loopback server."""
        if origin is None or not self._is_loopback or "*" in self._origins:
            return
        name = origin.decode("latin-1")
        if name in self._origins or (host is not None and urlsplit(name).netloc == host.decode("latin-1")):
            return
        raise ApiError(
            403,
            f"the page {name!r:.80} may not call this server; allowed_origins in its settings would let it",
            code="forbidden_origin",
        )

    def _check_key(self, authorization: bytes) -> None:
        if not self._keys:
            return
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Every key is compared, each in constant time: how long it takes says nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _limited(self, receive: Receive) -> Receive:
        """As `receive`, for a body whose length nobody announced."""
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large("more")
            return message

        return limited

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {found}; allowed: {self._max_body_bytes} bytes",
            code="body_too_large",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_keys(lines: Iterable[str]) -> tuple[str, ...]:
    """The keys of a file: one in a line; empty ones and comments are left out."""
    stripped = (line.strip() for line in lines)
    return tuple(line for line in stripped if line and not line.startswith("#"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
