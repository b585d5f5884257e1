"""HTTP/1.1 connections of the load generator: asyncio, keep-alive, one request at a time on each.

Times are taken when bytes are read from the socket. Whatever the server does (refuse, crash, stall, send invalid data),
the request ends with a failure kind that is counted, and the run continues.
"""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from urllib.parse import urlsplit

from weft.bench.serve_stream import (
    LONGEST_ERROR,
    Answer,
    EventReader,
    JunkError,
    LineReader,
    ResponseReader,
)
from weft.errors import InvalidRequestError

CONNECT_SECONDS = 10.0
# Limit between the last event and the end of the body. The answer is complete; only the reuse of the connection waits.
CLOSING_SECONDS = 1.0


_STREAM_TYPES = ("text/event-stream", "application/x-ndjson")


class Exchange:
    """One request on a connection: parses the received bytes into an answer, and sets `over` when the response ends."""

    def __init__(self, answer: Answer, over: asyncio.Future[None]) -> None:
        self.answer = answer
        self.response = ResponseReader()
        self.body = b""
        """Body of a response that is not an event stream: an error or a JSON document."""
        self._over = over
        self._events: EventReader | LineReader = EventReader()
        self._is_stream: bool | None = None  # None until the headers are read
        self.has_bytes = False
        self.is_cut = False
        """Whether the connection ended before the end of the answer, without another failure before."""

    @property
    def where(self) -> str:
        return "in the answer" if self.answer.chunk_times else "before the first token"

    def feed(self, data: bytes, now: float) -> None:
        self.has_bytes = True
        try:
            body = self.response.feed(data)
            if self._is_stream is None and self.response.status:
                kind = self.response.headers.get("content-type", "")
                if kind.startswith("application/x-ndjson"):
                    self._events = LineReader()
                self._is_stream = self.response.status == 200 and kind.startswith(_STREAM_TYPES)
            if self._is_stream:
                for payload in self._events.feed(body):
                    self.answer.take(payload, now)
            else:
                self.body = (self.body + body)[:LONGEST_ERROR]
        except JunkError as error:
            self.answer.fail("junk", str(error), now)
        if self.response.is_complete or self.answer.failure:
            self._finish(now)

    def end_of_stream(self, now: float, why: str) -> None:
        """Ends the exchange: the server closed the connection, or a time limit passed."""
        self.response.end_of_stream()
        if not self.response.is_complete and not self.answer.is_done:
            self.is_cut = self.answer.failure is None
            self.answer.fail(f"closed {self.where}", why, now)
        self._finish(now)

    def _finish(self, now: float) -> None:
        if self._over.done():
            return
        if not self.answer.failure and self._is_stream and not self.answer.is_done:
            if self.answer.finish_reason is None:
                self.answer.fail("cut short", "the stream ended without [DONE] or a finish reason", now)
            else:
                self.answer.is_done, self.answer.ended = True, now
        self._over.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """One socket. It owns its receive buffer, which saves an allocation per read."""

    def __init__(self) -> None:
        self._buffer = bytearray(64 << 10)
        self._view = memoryview(self._buffer)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._num_requests = 0

    @property
    def was_used(self) -> bool:
        """Whether the connection had carried a request before its last one."""
        return self._num_requests > 1

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, answer: Answer, seconds: float) -> Exchange:
        """Sends a request and waits for the end of its response, at most `seconds`."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._exchange = exchange = Exchange(answer, over)
        self._num_requests += 1
        if self._transport is None or not self.is_open:
            exchange.end_of_stream(perf_counter(), "the server closed the connection before the request")
        else:
            self._transport.write(request)
        limit = loop.call_later(max(0.0, seconds), self._time_out, exchange, seconds)
        try:
            await over
        finally:
            limit.cancel()
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None
            self._exchange = None
            if not exchange.response.keeps_connection or answer.failure:
                self.abort()
        return exchange

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        now = perf_counter()
        exchange = self._exchange
        if exchange is None:  # the server sent bytes, but no request is open
            self.abort()
            return
        exchange.feed(bytes(self._view[:nbytes]), now)
        if exchange.answer.is_done and not exchange.response.is_complete and self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.call_later(
                CLOSING_SECONDS, exchange.end_of_stream, now, "no end of the body"
            )

    def eof_received(self) -> bool:
        return False  # close our side too; connection_lost follows

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._exchange is not None:
            self._exchange.end_of_stream(
                perf_counter(), str(error) if error else "the server closed the connection"
            )

    def _time_out(self, exchange: Exchange, seconds: float) -> None:
        now = perf_counter()
        exchange.answer.fail(f"timed out {exchange.where}", f"not finished after {seconds:.3g} s", now)
        exchange.end_of_stream(now, "timed out")


class Client:
    """Connections to one server. They are opened before a request is sent if possible, and reused."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, name = parts.port, (parts.hostname or "").encode("idna")
        except ValueError:  # unclosed brackets, an invalid port, or an invalid host name
            parts, port, name = urlsplit(""), None, b""
        if parts.scheme not in ("http", "https") or not parts.hostname or not name:
            raise InvalidRequestError(
                f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000", field="url"
            )
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.prefix}"
        self.num_reconnects = 0
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = api_key
        self._idle: list[Connection] = []
        self._address = ""

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a whole request. They are built before the measurement, so that this costs no measured time."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: weft-bench",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "\r\n"]).encode() + body

    async def reserve(self) -> Connection:
        """An open connection for one request. Raises OSError if the server accepts none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connect()

    def release(self, connection: Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def open_idle(self, count: int) -> None:
        """Opens connections until `count` are idle. Ignores failures: the requests will fail too and be counted."""
        self._idle = [connection for connection in self._idle if connection.is_open]
        missing = count - len(self._idle)
        found = await asyncio.gather(*(self._connect() for _ in range(missing)), return_exceptions=True)
        self._idle += [connection for connection in found if isinstance(connection, Connection)]

    async def send(
        self, request: bytes, seconds: float, connection: Connection | None = None
    ) -> tuple[Answer, Exchange | None]:
        """Sends a request on `connection`, by default on an idle or new one. The clock of the answer starts here."""
        answer = Answer(perf_counter())
        deadline = answer.began + seconds
        try:
            connection = connection or await self.reserve()
            exchange = await connection.exchange(request, answer, deadline - perf_counter())
            if exchange.is_cut and not exchange.has_bytes and connection.was_used:
                # A server may close an idle connection just when it is reused. Retry once on a new connection.
                self.num_reconnects += 1
                answer.failure = None
                connection = await self._connect()
                exchange = await connection.exchange(request, answer, deadline - perf_counter())
        except (OSError, TimeoutError) as error:
            answer.fail(*_describe(error), perf_counter())
            return answer, None
        self.release(connection)
        _check_status(answer, exchange)
        return answer, exchange

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            # Only the first connection resolves the name, so that DNS is not measured.
            if not self._address:
                found = await loop.getaddrinfo(self.host, self.port, type=1)
                addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            else:
                addresses = [self._address]
            for address in addresses:
                try:
                    _, connection = await loop.create_connection(
                        Connection,
                        address,
                        self.port,
                        ssl=self._tls,
                        server_hostname=self.host if self._tls else None,
                    )
                except OSError:
                    if address == addresses[-1]:
                        raise
                else:
                    self._address = address
                    return connection
        raise OSError(f"{self.host} has no address")


def _check_status(answer: Answer, exchange: Exchange) -> None:
    """Marks a complete response without a stream of tokens as failed."""
    if answer.failure is None and not answer.is_done:
        status = exchange.response.status
        text = exchange.body.decode("utf-8", "replace")
        kind = "not streamed" if status == 200 else f"HTTP {status}"
        answer.fail(kind, text, perf_counter())
    elif answer.failure is None and not answer.chunk_times and not answer.completion_tokens:
        answer.fail("no tokens", "the answer ended without a token", answer.ended)


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, ConnectionRefusedError):
        return "refused", str(error)
    if isinstance(error, TimeoutError):
        return "connect timed out", f"no connection after {CONNECT_SECONDS:g} s"
    return "cannot connect", str(error) or type(error).__name__
