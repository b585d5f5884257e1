"""Access control: checks Host, Origin, API key and body size before a body is read or a route runs."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.server.admission.keys import ApiKey, KeyRing
from weft.server.api.formats import Formats, error_writer
from weft.server.errors import ERROR_WRITER, ApiError
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error, body_budget_error
from weft.server.http.loopback import is_loopback
from weft.server.http.scope import ANSWER, BODY, KEY
from weft.server.http.uploads import FORM_BYTES, UPLOADS
from weft.server.internal import INTERNAL
from weft.server.settings import ServerSettings

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json"})
"""Routes without a key, for probes and browsers that cannot send one. They reveal nothing
that is not in the manual."""
_OPEN_FOLDER = "/page/"
"""The files of the page, which need no key either."""
_ADMIN, _LIVE = "/admin", "/live"


class Guard:
    """Middleware before every route."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, formats: Formats) -> None:
        self._app = app
        self._formats = formats
        self._max_body_bytes = settings.max_body_bytes
        self._max_file_bytes = settings.max_file_bytes
        self._bodies = ByteBudget(settings.max_body_bytes, settings.max_buffered_bytes, body_budget_error)
        self._answers = ByteBudget(
            settings.max_answer_bytes, settings.max_buffered_answer_bytes, answer_budget_error
        )
        # Batches have budgets of their own, so that they cannot use up the budgets of clients.
        self._bodies_of_batches = _part_of(self._bodies)
        self._answers_of_batches = _part_of(self._answers)
        self._keys = KeyRing(settings.api_keys)
        self._has_admin = any(key.admin for key in settings.api_keys)
        self._origins = frozenset(settings.allowed_origins)
        self._is_loopback = is_loopback(settings.host)
        self._own_name = settings.host.lower()
        self._is_private = self._is_loopback and not settings.api_keys
        """Only this machine can reach the server, and all of its users may use it: they need no admin key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no lifespan events and no websockets
        try:
            self._check(scope)
        except ApiError as error:
            error.headers |= self._cors_headers(scope)
            await error.response(scope)(scope, receive, send)
            return
        is_idle_work = INTERNAL in scope and scope[INTERNAL].is_idle_work
        body = scope[BODY] = RequestBytes(self._bodies_of_batches if is_idle_work else self._bodies)
        answer = scope[ANSWER] = RequestBytes(self._answers_of_batches if is_idle_work else self._answers)
        try:
            await self._app(scope, self._limited_receive(scope, receive), send)
        finally:
            body.release()
            answer.release()

    def _check(self, scope: Scope) -> None:
        """Checks the head of a request, and sets its key and the form of its errors in the scope. Raises ApiError."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope[ERROR_WRITER] = error_writer(self._formats, scope["path"], headers)
        if INTERNAL in scope:
            scope[KEY] = scope[INTERNAL].key
            return
        self._check_host(headers.get(b"host"))
        self._check_origin(headers.get(b"origin"), headers.get(b"host"))
        scope[KEY] = None
        if not _is_open(scope["path"]) and scope["method"] != "OPTIONS":
            key = self._keys.find(_authorization(headers))
            if _is_within(scope["path"], _ADMIN):
                self._check_admin(key, headers)
            elif key is None and self._keys.keys:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            elif _is_within(scope["path"], _LIVE):
                self._check_admin(key, headers)
            scope[KEY] = key
        self._check_encoding(headers.get(b"content-encoding", b"identity"))
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_bytes(scope):
            raise self._too_large(scope, f"{int(length)} bytes")

    def _check_host(self, host: bytes | None) -> None:
        """Prevents DNS rebinding: a web page whose host name resolves to this machine must not reach the server."""
        if host is None:
            return  # HTTP/1.0
        found = _HOST.fullmatch(host.decode("latin-1"))
        if found is None:
            raise ApiError(400, "the Host header is not a host and a port", code="invalid_host")
        name = found["name"].lower()
        if self._is_loopback and not (name == self._own_name or is_loopback(name)):
            raise ApiError(
                403,
                f"the Host header names {name!r:.80}; this server accepts only requests to localhost. "
                "Start it with --host to serve other machines",
                code="forbidden_host",
            )

    def _check_origin(self, origin: bytes | None, host: bytes | None) -> None:
        """Refuses requests of web pages to a loopback server, except from allowed origins and from its own pages.
        Browsers send the origin of the page that makes a request."""
        if origin is None or not self._is_loopback or "*" in self._origins:
            return
        name = origin.decode("latin-1")
        if name in self._origins or _is_of(origin, host):
            return
        raise ApiError(
            403,
            f"the page {name!r:.80} may not call this server; add it to allowed_origins in the settings of the server",
            code="forbidden_origin",
        )

    def _cors_headers(self, scope: Scope) -> dict[str, str]:
        """CORS headers for errors of the guard, so that an allowed page can read them. Other responses get these headers
        from the CORS middleware."""
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
        is_allowed = bool(origin) and (origin in self._origins or "*" in self._origins)
        return {"access-control-allow-origin": origin, "vary": "Origin"} if is_allowed else {}

    def _check_admin(self, key: ApiKey | None, headers: dict[bytes, bytes]) -> None:
        """Raises a 403 unless `key` is an admin key. If only this machine can reach the server, its pages need none."""
        if key is not None and key.admin:
            return
        # Pages of `allowed_origins` may use the model, but may not read or cancel the requests of others.
        if self._is_private and _is_of(headers.get(b"origin"), headers.get(b"host")):
            return
        if self._has_admin:
            message = "this route needs an admin key; send it as 'Authorization: Bearer KEY'"
        else:
            message = (
                "admin routes and live data are off; add a key with admin = true to the file of --api-key-file to turn "
                "them on"
            )
        raise ApiError(403, message, code="admin_key_required")

    def _check_encoding(self, encoding: bytes) -> None:
        """Refuses compressed bodies: a small one could expand to any size."""
        if encoding.strip().lower() not in (b"", b"identity"):
            raise ApiError(
                400,
                f"the body is encoded as {encoding.decode('latin-1')!r:.80}; "
                "send it uncompressed, without Content-Encoding",
                code="unsupported_encoding",
            )

    def _limited_receive(self, scope: Scope, receive: Receive) -> Receive:
        """Wraps `receive`: counts the bytes of the body and raises if it or all bodies together are too large.

        A body with a Content-Length is counted in full at its first byte. Otherwise many concurrent bodies would be
        received in part, exceed the limit together, and all be refused.
        """
        body: RequestBytes = scope[BODY]
        max_bytes, is_upload = self._max_bytes(scope), _is_upload(scope)
        announced = int(dict(scope["headers"]).get(b"content-length", b"0"))
        size = 0

        async def limited() -> Message:
            nonlocal size
            is_first = size == 0
            message = await receive()
            num_bytes = len(message.get("body", b""))
            size += num_bytes
            if size > max_bytes:
                raise self._too_large(scope, "more")
            try:
                if is_upload:
                    pass  # an upload is written to disk in pieces, so it needs no memory budget
                elif announced == 0 or (is_first and size):
                    body.add(announced or num_bytes)
            except ApiError:
                del message["body"]
                # Read the rest: a client that is still sending would see a reset connection instead of this error.
                while message.get("more_body", False) and size <= max_bytes:
                    message = await receive()
                    size += len(message.get("body", b""))
                raise
            return message

        return limited

    def _max_bytes(self, scope: Scope) -> int:
        return self._max_file_bytes + FORM_BYTES if _is_upload(scope) else self._max_body_bytes

    def _too_large(self, scope: Scope, found: str) -> ApiError:
        name = "max_file_bytes" if _is_upload(scope) else "max_body_bytes"
        message = f"the body has {found}; allowed: {self._max_bytes(scope)} bytes ({name})"
        return ApiError(413, message, code="body_too_large")


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _is_of(origin: bytes | None, host: bytes | None) -> bool:
    """Whether the request comes from a page of this server, or from no page at all."""
    if origin is None:
        return True
    return host is not None and urlsplit(origin.decode("latin-1")).netloc == host.decode("latin-1")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _is_upload(scope: Scope) -> bool:
    return scope["path"] in UPLOADS and scope["method"] == "POST"


def _part_of(budget: ByteBudget) -> ByteBudget:
    """A budget of a quarter of the bytes, but at least the limit of a single request."""
    return ByteBudget(budget.max_each, max(budget.max_each, budget.max_bytes // 4), budget.refusal)


def _authorization(headers: dict[bytes, bytes]) -> bytes:
    """The API key in the form of an Authorization header. Some clients send it as x-api-key."""
    given = headers.get(b"authorization", b"")
    key = headers.get(b"x-api-key", b"")
    return b"Bearer " + key if key and not given else given
