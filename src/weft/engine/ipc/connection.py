"""The client's end of the connection to the engine's process. Messages are taken in where they arrive: between the socket
and whoever waits for a token no other task is woken, since at one stream that is done for every single token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import msgspec

from weft.engine.ipc import wire

_TURN_SECONDS = 2e-3
"""Messages are taken for so long at a time; then everyone else in the event loop has a turn."""


class Connection(asyncio.Protocol):
    """Hands messages to `take` until the other side is gone. Belongs to one event loop."""

    def __init__(self, take: Callable[[wire.FromEngine], object], tokens_per_turn: int) -> None:
        """After so many tokens whoever reads them has a turn: one read of the socket may hold more than a reader may
        be behind."""
        self.heard = asyncio.Event()
        """Set once the other side has sent a message other than a beat or a warning, or is gone."""
        self.gone = asyncio.Event()
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
        """Nothing, where nobody is there any more."""
        if not self._transport.is_closing():
            self._transport.write(wire.framed(message))

    async def drain(self) -> None:
        """Until what was sent is on its way, or nobody is there any more."""
        await self._may_write.wait()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        """As `close`, without waiting until the other side has taken what was sent."""
        self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._contents = self._frames.feed(data)
        self._take_turn()

    def _take_turn(self) -> None:
        turn_ends, num_taken = self._loop.time() + _TURN_SECONDS, 0
        try:
            while (message := self._next_message()) is not None:
                self._take(message)
                if isinstance(message, wire.Beat | wire.Warned):
                    continue
                self.heard.set()
                if isinstance(message, wire.StepReport):
                    num_taken += len(message.tokens) + sum(one.effort for one in message.outputs)
                if num_taken >= self._tokens_per_turn or self._loop.time() > turn_ends:
                    self._transport.pause_reading()
                    self._loop.call_soon(self._go_on)
                    return
        except BaseException:
            self._transport.abort()  # what was taken would come again with the next bytes
            raise

    def _next_message(self) -> wire.FromEngine | None:
        """None: all that came is taken, or it is no longer to be understood, which is as good as gone."""
        try:
            content = next(self._contents, None)
            return None if content is None else wire.from_engine.decode(content)
        except (ValueError, msgspec.MsgspecError):
            self._transport.abort()
            return None

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._take_turn()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.set()
        self.gone.set()
        self._may_write.set()
