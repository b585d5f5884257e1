"""Parses what a server sends: HTTP/1.1 responses, server-sent events, JSON lines, and the events of an answer.

This module uses no socket and no clock: the caller passes bytes, split at any position, with their arrival time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from weft.bench.serve_events import Usage, read_event

# Limits in bytes. A server that exceeds them does not follow the protocol.
LONGEST_LINE = 1 << 20
LONGEST_HEADERS = 64 << 10
LONGEST_ERROR = 64 << 10

_DECODE = json.JSONDecoder().decode  # json.loads detects the encoding and checks its options at every call


class JunkError(Exception):
    """The server sent bytes that the protocol does not allow here."""


@dataclass(frozen=True)
class Failure:
    """Why a request failed. Failures are counted by `kind`; `detail` is for the report."""

    kind: str
    detail: str


class ResponseReader:
    """Parses one HTTP response: status, headers, and the body without its framing."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the headers are read
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._pending = b""
        self._chunk_left = 0
        self._after_chunk = False
        self._in_trailers = False
        self._is_chunked = False
        self._length_left: int | None = None

    @property
    def keeps_connection(self) -> bool:
        framed = self._is_chunked or self._length_left is not None
        return self.is_complete and framed and "close" not in self.headers.get("connection", "").lower()

    def feed(self, data: bytes) -> bytes:
        """Returns the body bytes in `data`. Raises JunkError if `data` is not valid HTTP."""
        if self.is_complete:
            raise JunkError("bytes after the end of the response")
        if not self.status:
            data = self._pending + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > LONGEST_HEADERS or not data.startswith(b"HTTP/"[: len(data)]):
                    raise JunkError(f"not an HTTP response: {data[:80]!r}")
                self._pending = data
                return b""
            self._read_headers(data[:end])
            data, self._pending = data[end + 4 :], b""
            if self.status < 200:  # 1xx, such as 100 Continue: the final response follows
                self.status, self.headers = 0, {}
                return self.feed(data) if data else b""
        if self._is_chunked:
            return self._unchunk(data)
        if self._length_left is None:
            return data
        if len(data) > self._length_left:
            raise JunkError(
                f"the body is {len(data) - self._length_left} bytes longer than its content-length"
            )
        self._length_left -= len(data)
        self.is_complete = self._length_left == 0
        return data

    def end_of_stream(self) -> None:
        """Called when the server has closed the connection. This ends a body without chunks and content-length."""
        if self.status and not self._is_chunked and self._length_left is None:
            self.is_complete = True

    def _read_headers(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdecimal() or not 100 <= int(code) <= 999:
            raise JunkError(f"not an HTTP/1.1 status line: {first[:80]!r}")
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(code)
        self._is_chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length")
        if length is not None and not self._is_chunked:
            if not length.isdecimal():
                raise JunkError(f"content-length {length[:80]!r} is not a number")
            self._length_left = int(length)
            self.is_complete = self._length_left == 0

    def _unchunk(self, data: bytes) -> bytes:
        if self._pending:
            data, self._pending = self._pending + data, b""
        pieces, position, size = [], 0, len(data)
        while position < size and not self.is_complete:
            if self._chunk_left:
                piece = data[position : position + self._chunk_left]
                pieces.append(piece)
                position += len(piece)
                self._chunk_left -= len(piece)
                self._after_chunk = not self._chunk_left
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._pending = data[position:]
                if len(self._pending) > LONGEST_HEADERS:
                    raise JunkError(f"no chunk size in {len(self._pending)} bytes")
                break
            self._take_line(data[position:end])
            position = end + 2
        if self.is_complete and position < size:
            raise JunkError("bytes after the end of the response")
        return b"".join(pieces) if len(pieces) != 1 else pieces[0]

    def _take_line(self, line: bytes) -> None:
        """Handles a framing line: the empty line after a chunk, the size of the next chunk, or a trailer."""
        if self._in_trailers:
            self.is_complete = not line
        elif self._after_chunk:
            if line:
                raise JunkError(f"a chunk is longer than its size: {line[:80]!r}")
            self._after_chunk = False
        else:
            try:
                self._chunk_left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise JunkError(f"not a chunk size: {line[:80]!r}") from None
            if self._chunk_left < 0:
                raise JunkError(f"not a chunk size: {line[:80]!r}")
            self._in_trailers = self._chunk_left == 0


class EventReader:
    """Parses server-sent events, split at any byte, and returns the data of each. Ignores other fields and comments."""

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LONGEST_LINE:
            raise JunkError(f"an event line has no end after {len(self._pending):,} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events


class LineReader:
    """Splits a stream of JSON lines, cut at any byte."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LONGEST_LINE:
            raise JunkError(f"a line has no end after {len(self._pending):,} bytes")
        return [line for line in lines if line.strip()]


@dataclass(slots=True)
class Answer:
    """An answer that is being received. Times are taken by the client when bytes are read from the socket."""

    began: float
    chunk_times: list[float] = field(default_factory=list)
    """Arrival times of chunks with tokens. Chunks from one read have the same time."""
    ended: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    is_done: bool = False

    def take(self, payload: bytes, now: float) -> None:
        """Adds one event of the stream. Events after the end or a failure are ignored."""
        if self.is_done or self.failure:
            return
        if payload == b"[DONE]":
            self.is_done, self.ended = True, now
            return
        try:
            chunk = _DECODE(payload.decode())
        except (ValueError, RecursionError):
            raise JunkError(f"an event is not JSON: {payload[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise JunkError(f"an event is not an object: {payload[:80]!r}")
        try:
            event = read_event(chunk)
        except TypeError as error:
            raise JunkError(f"{error}: {payload[:80]!r}") from None
        if event.error is not None:
            self.fail("error event", event.error, now)
            return
        if event.usage is not None:
            self._take_usage(event.usage)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.chunk_times += [now] * event.num_with_tokens
        if event.is_last:
            self.is_done, self.ended = True, now

    def fail(self, kind: str, detail: str, now: float) -> None:
        """Records the first failure. Later ones are its consequences."""
        if self.failure is None:
            self.failure, self.ended = Failure(kind, detail[:500]), now

    def _take_usage(self, usage: Usage) -> None:
        if usage.prompt is not None:
            self.prompt_tokens = usage.prompt
        if usage.completion is not None:
            self.completion_tokens = usage.completion
        if usage.cached is not None:
            self.cached_tokens = usage.cached
