"""HTTP/1.1 on one connection, as uvicorn and h11 speak it, with an end to waiting for a request that trickles in and for a
client that does not read its answer."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
import uuid
from http import HTTPStatus

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weft.server.errors import ApiError

# uvicorn warns of every request that is no HTTP; whoever sends junk must not fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

WRITER = "weft.writer"
"""Where in the state of a request's scope its connection's `BodyWriter` is."""
_STALL_CHECKS = 4
"""A stalled reader is noticed after `stalled_reader_seconds`, and a quarter of them later at most."""


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class _Connection(h11.Connection):
    """As h11's own; but a piece of a stream, of which there may be one for every token, goes through no state machine."""

    _is_chunked = False

    @property
    def accepts_chunks(self) -> bool:
        """Whether an answer is under way whose pieces are chunks of its body."""
        return self._is_chunked and self.our_state is h11.SEND_BODY

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if type(event) is h11.Data and self.accepts_chunks:
            return [_chunk(event.data)] if event.data else []
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response and sent is not None:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(sent).lower()
        return sent


class BodyWriter:
    """Writes pieces of the answer under way straight to the connection. ASGI's `send`, through all that stands around the
    application, costs more than a piece itself, and nobody there looks at more than the head of an answer. It knows
    nothing that knows it in the end, so that both leave no garbage."""

    def __init__(self, connection: _Connection, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._connection = connection
        self._transport = transport
        self._flow = flow

    @property
    def accepts_chunks(self) -> bool:
        """Whether an answer is under way whose pieces are chunks: to be asked once its head is sent, before `write`."""
        return self._connection.accepts_chunks

    def write(self, piece: bytes) -> bool:
        """Nothing, where the client is gone. False: it has to go by `send`, which waits until the client has read more."""
        if self._flow.write_paused:
            return False
        if not self._transport.is_closing():
            self._transport.write(_chunk(piece))
        return True


class TimedProtocol(H11Protocol):
    """A request has `header_seconds` for its headers and `body_seconds` for all of it, counted from its first byte. A
    connection is aborted when bytes wait to be sent and the client accepts none for `stalled_reader_seconds`: whatever
    the answer is, and whether it is complete or not."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        *,
        header_seconds: float,
        body_seconds: float,
        stalled_reader_seconds: float,
    ) -> None:
        super().__init__(config, state, app_state={})
        assert config.h11_max_incomplete_event_size is not None, "the server bounds headers"
        self.conn: _Connection = _Connection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._timed_state: object = None
        self._stall_check_seconds = stalled_reader_seconds / _STALL_CHECKS
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With no room of its own the transport calls `pause_writing` as soon as bytes wait that the socket did not accept,
        # and `resume_writing` when none does. Nothing is written in between.
        transport.set_write_buffer_limits(high=0)
        self.app_state[WRITER] = BodyWriter(self.conn, transport, self.flow)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
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
        # asyncio's transport keeps a method of its own, and so itself, until somebody looks for garbage.
        if hasattr(self.transport, "_read_ready_cb"):
            self.transport._read_ready_cb = None

    def _update_timer(self) -> None:
        """One timer for each state in which the client has something left to send; more bytes do not wind it up again."""
        state = self.conn.their_state
        waits = (state is h11.IDLE and self._is_request_begun) or state is h11.SEND_BODY
        if not waits:
            self._stop_timer()
        elif state is not self._timed_state:
            self._stop_timer()
            seconds = self._header_seconds if state is h11.IDLE else self._body_seconds
            self._timer, self._timed_state = self.loop.call_later(seconds, self._time_out), state

    @property
    def _is_request_begun(self) -> bool:
        """Between two requests a connection may rest as long as keep-alive lets it, but not before the first."""
        return self.cycle is None or bool(self.conn.trailing_data[0])

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timed_state = None, None

    def _time_out(self) -> None:
        if self.transport.is_closing():
            return
        # A body that is still coming may have been answered already, by an error.
        if self._timed_state is h11.IDLE or not self.cycle.response_started:
            self._send_error(
                ApiError(408, "the request did not arrive in time; send it again", code="timeout")
            )
        self.transport.close()

    def _watch_reader(self, num_unread: int, num_checks: int) -> None:
        """The client has left `num_unread` bytes unread, the same number in `num_checks` checks."""
        self._stall_timer = self.loop.call_later(
            self._stall_check_seconds, self._check_reader, num_unread, num_checks
        )

    def _check_reader(self, num_unread: int, num_checks: int) -> None:
        num_left = self._num_unread()
        num_checks = 0 if num_left < num_unread else num_checks + 1
        if num_checks == _STALL_CHECKS:
            self.transport.abort()
        else:
            self._watch_reader(num_left, num_checks)

    def _num_unread(self) -> int:
        """Bytes that the client's side has not accepted. Those in the kernel count too: a socket accepts nothing until a
        third of its megabytes is free again, which takes a client on a slow line longer than a stalled one is given."""
        in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _stop_watching_reader(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """What came cannot be read; told in the API's own form, unless an answer is half out already."""
        is_answering = self.cycle is not None and self.cycle.response_started
        if not is_answering or self.cycle.response_complete:
            message = "this is not a request of HTTP/1.1, or its headers are too large"
            self._send_error(ApiError(400, message, code="invalid_http"))
        self.transport.close()

    def _send_error(self, error: ApiError) -> None:
        """Where there is no request that the application could answer."""
        body = msgspec.json.encode(error.body)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
