"""The client's end of the connection to the engine's process.

Messages are handled directly in the socket callback. Passing them to a task would cost one more task switch for every
token of a single stream.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import msgspec

from weft.engine.ipc import wire

_TURN_SECONDS = 2e-3
"""After this long the connection stops handling messages, so that other tasks of the event loop can run."""


class Connection(asyncio.Protocol):
    """Passes messages to `take` until the connection closes. Use it from one event loop only."""

    def __init__(self, take: Callable[[wire.FromEngine], object], tokens_per_turn: int) -> None:
        """After `tokens_per_turn` tokens the connection lets other tasks run, so that they read the tokens. One read of
        the socket may return more tokens than the buffer of an answer can hold."""
        self.first_message = asyncio.Event()
        """Set at the first message other than heartbeats and warnings, and when the connection closes."""
        self.closed = asyncio.Event()
        self._take = take
        self._tokens_per_turn = tokens_per_turn
        self._frames = wire.Frames()
        self._contents: Iterator[bytes] = iter(())
        self._loop = asyncio.get_running_loop()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._transport: asyncio.Transport

    async def open(self, connection: socket.socket) -> None:
        await self._loop.create_unix_connection(lambda: self, sock=connection)

    def send(self, message: wire.Message) -> None:
        """Sends a message. Does nothing if the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(wire.framed(message))

    async def drain(self) -> None:
        """Waits until the send buffer has room, or the connection closes."""
        await self._may_write.wait()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        """Like `close`, but drops data that is not sent yet."""
        self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._contents = self._frames.feed(data)
        self._take_turn()

    def _take_turn(self) -> None:
        """Handles the received messages. At the limit of tokens or of time it stops reading until the next turn."""
        turn_ends, num_taken = self._loop.time() + _TURN_SECONDS, 0
        try:
            while (message := self._next_message()) is not None:
                self._take(message)
                if isinstance(message, wire.Heartbeat | wire.Warned):
                    continue
                self.first_message.set()
                if isinstance(message, wire.StepReport):
                    num_taken += len(message.tokens) + sum(one.read_cost for one in message.outputs)
                if num_taken >= self._tokens_per_turn or self._loop.time() > turn_ends:
                    self._transport.pause_reading()
                    self._loop.call_soon(self._resume)
                    return
        except BaseException:
            # Without the abort, frames that were already handled would be delivered again when more bytes arrive.
            self._transport.abort()
            raise

    def _next_message(self) -> wire.FromEngine | None:
        """The next received message; None if all are handled. If the data is invalid, closes the connection and returns
        None."""
        try:
            content = next(self._contents, None)
            return None if content is None else wire.from_engine.decode(content)
        except (ValueError, msgspec.MsgspecError):
            self._transport.abort()
            return None

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._take_turn()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.first_message.set()
        self.closed.set()
        self._may_write.set()
