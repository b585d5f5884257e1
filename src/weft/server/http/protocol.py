"""HTTP/1.1 on one connection, based on uvicorn and h11, with timeouts for slow requests and stalled readers."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weft.server.errors import ERROR_WRITER, ApiError
from weft.server.http.scope import RECORD
from weft.server.http.uploads import UPLOADS
from weft.server.logs import Record, record_of_task

# uvicorn logs a warning for each request that is not HTTP; a client must not be able to fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

WRITER = "weft.writer"
"""Entry of the scope's state with the `BodyWriter` of the connection."""
_MIN_UPLOAD_BYTES = 1 << 20
"""An upload may take longer than `body_seconds`, if at least this many bytes arrive in each period of that length."""
_STALL_CHECKS = 4
"""Checks per `stalled_reader_seconds`. A stalled reader is found at most a quarter of that time late."""


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class _Connection(h11.Connection):
    """An h11 connection that writes chunks without the h11 state machine, which is too slow for one chunk per token."""

    _is_chunked = False

    @property
    def accepts_chunks(self) -> bool:
        """Whether a response with chunked encoding is being sent."""
        return self._is_chunked and self.our_state is h11.SEND_BODY

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if type(event) is h11.Data and self.accepts_chunks:
            return [_chunk(event.data)] if event.data else []
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response and sent is not None:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(sent).lower()
        return sent


class BodyWriter:
    """Writes chunks of the current response directly to the transport. ASGI's `send` passes through all middleware,
    which costs more than the chunk itself, and no middleware inspects a body. The writer has no reference to its
    protocol: that would be a reference cycle."""

    def __init__(self, connection: _Connection, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._connection = connection
        self._transport = transport
        self._flow = flow

    @property
    def accepts_chunks(self) -> bool:
        """Whether `write` can be used. Check it once, after the head of the response is sent."""
        return self._connection.accepts_chunks

    def write(self, piece: bytes) -> bool:
        """Writes the piece, or drops it if the client is gone. Returns False if the transport is full: then use `send`,
        which waits until the client has read more."""
        if self._flow.write_paused:
            return False
        if not self._transport.is_closing():
            self._transport.write(_chunk(piece))
        return True


class TimedProtocol(H11Protocol):
    """A request must send its headers within `header_seconds` and its body within `body_seconds`. A connection is
    aborted if bytes wait to be sent and the client accepts none for `stalled_reader_seconds`. This holds for every
    response, streamed or not."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        *,
        header_seconds: float,
        body_seconds: float,
        stalled_reader_seconds: float,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`new_id` makes the ids of requests that never reach the application. None: their responses have no id."""
        super().__init__(config, state, app_state={})
        assert config.h11_max_incomplete_event_size is not None, "the server sets a limit for headers"
        self.conn: _Connection = _Connection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._new_id = new_id
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._timed_state: object = None
        self._num_received = self._num_at_timer = 0
        self._stall_check_seconds = stalled_reader_seconds / _STALL_CHECKS
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With high=0 the transport calls `pause_writing` as soon as the socket does not accept all bytes, and
        # `resume_writing` when all are sent. Nothing is written in between.
        transport.set_write_buffer_limits(high=0)
        self.app_state[WRITER] = BodyWriter(self.conn, transport, self.flow)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self._num_unread(), 0)

    def resume_writing(self) -> None:
        self._stop_watching_reader()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watching_reader()
        super().connection_lost(exc)
        # asyncio's transport stores one of its own bound methods: a reference cycle, broken here.
        if hasattr(self.transport, "_read_ready_cb"):
            self.transport._read_ready_cb = None

    def _update_timer(self) -> None:
        """Starts a timer for each state in which the client must send bytes: the headers, then the body. New bytes do
        not restart it."""
        state = self.conn.their_state
        waits = (state is h11.IDLE and self._must_send_request) or state is h11.SEND_BODY
        if not waits:
            self._stop_timer()
        elif state is not self._timed_state:
            self._stop_timer()
            seconds = self._header_seconds if state is h11.IDLE else self._body_seconds
            self._timer, self._timed_state = self.loop.call_later(seconds, self._time_out), state
            self._num_at_timer = self._num_received

    @property
    def _must_send_request(self) -> bool:
        """Whether the client must send a request now: on a new connection, or after the first bytes of the next
        request. Between two requests only the keep-alive timeout applies."""
        return self.cycle is None or bool(self.conn.trailing_data[0])

    @property
    def _is_upload(self) -> bool:
        return bool(self.scope["path"] in UPLOADS)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timed_state = None, None

    def _time_out(self) -> None:
        """Closes the connection, with a 408 if no response has begun. An upload that makes progress gets more time."""
        if self.transport.is_closing():
            return
        num_bytes = self._num_received - self._num_at_timer
        if self._timed_state is h11.SEND_BODY and self._is_upload and num_bytes >= _MIN_UPLOAD_BYTES:
            self._stop_timer()
            self._update_timer()
            return
        # A request may have got an error response before its body was complete.
        if self._timed_state is h11.IDLE or not self.cycle.response_started:
            error = ApiError(408, "the request did not arrive in time; send it again", code="timeout")
            self._send_error(error, has_headers=self._timed_state is h11.SEND_BODY)
        self.transport.close()

    def _watch_reader(self, num_unread: int, num_checks: int) -> None:
        """Schedules the next check. `num_unread` bytes are unread. The last `num_checks` checks found no progress."""
        self._stall_timer = self.loop.call_later(
            self._stall_check_seconds, self._check_reader, num_unread, num_checks
        )

    def _check_reader(self, num_unread: int, num_checks: int) -> None:
        """Aborts the connection if `_STALL_CHECKS` checks in a row found no progress. Else schedules the next check."""
        num_left = self._num_unread()
        num_checks = 0 if num_left < num_unread else num_checks + 1
        if num_checks == _STALL_CHECKS:
            self.transport.abort()
        else:
            self._watch_reader(num_left, num_checks)

    def _num_unread(self) -> int:
        """Bytes that the client has not acknowledged, in the transport and in the kernel. The kernel's bytes must
        count: a socket accepts no bytes until a third of its send buffer is free. On a slow line that takes longer than
        the timeout, although the client reads."""
        in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _stop_watching_reader(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP with an error in the API's format, unless a response is partly sent."""
        is_answering = self.cycle is not None and self.cycle.response_started
        if not is_answering or self.cycle.response_complete:
            message = "this is not an HTTP/1.1 request, or its headers are too large; send a valid request"
            self._send_error(ApiError(400, message, code="invalid_http"))
        self.transport.close()

    def _send_error(self, error: ApiError, *, has_headers: bool = False) -> None:
        """Sends an error without the application: there is no complete request. If its headers are complete, the error
        has the form of its route."""
        status, content = error.status, error.body
        scope: Mapping[str, Any] = self.scope if has_headers else {}
        record: Record | None = scope.get(RECORD)
        if (write := scope.get(ERROR_WRITER)) is not None:
            token = record_of_task.set(record)
            status, content = write(error)
            record_of_task.reset(token)
        body = msgspec.json.encode(content)
        request_id = ""
        if self._new_id is not None:
            request_id = f"x-request-id: {self._new_id() if record is None else record.request_id}\r\n"
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{request_id}\r\n"
        )
        self.transport.write(head.encode() + body)
