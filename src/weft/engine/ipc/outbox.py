"""Sends messages from the engine's process: directly if the socket has room, else in a writer thread.

A step of a single stream takes milliseconds, and waking a thread for each message would cost as much as writing it. The
writer thread sends what the socket did not accept, so that a slow client never delays a step.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from weft.engine.ipc import wire

_LARGE_STEP = 256
_MAX_MERGED = 16
"""The writer thread sends at most this many messages in one write."""


class Outbox:
    """Owns the writing end of a connection. Any thread may call `send`; it never blocks on a slow client."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._unsent_bytes = b""
        """The rest of a message that the socket accepted in part."""
        self._backlog: deque[wire.Message] = deque()
        self._is_writing = False
        """Whether the writer thread has data to send. Then new messages go to the backlog, to keep their order."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="weft-writer", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return self._thread.native_id or 0

    def send(self, message: wire.Message) -> None:
        """Writes a message to the socket. What the socket does not accept at once is left to the writer thread."""
        with self._changed:
            if self._is_closed:
                return
            if self._is_writing:
                self._backlog.append(message)
                return
            content = wire.framed(message)
            try:
                num_sent = self._connection.send(content, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_sent = 0
            except OSError:  # the client is gone; the reader thread finds out and stops the engine
                self._is_closed = True
                return
            if num_sent < len(content):
                self._unsent_bytes, self._is_writing = content[num_sent:], True
                self._changed.notify()

    def close(self, timeout: float) -> None:
        """Refuses new messages and waits up to `timeout` seconds until the earlier ones are sent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _write(self) -> None:
        """The main function of the writer thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_writing or self._is_closed)
                if not self._is_writing:
                    return
                content, self._unsent_bytes = self._unsent_bytes, b""
            while content:
                try:
                    self._connection.sendall(content)
                except OSError:
                    with self._changed:
                        self._is_closed, self._is_writing = True, False
                        self._backlog.clear()
                    return
                with self._changed:
                    taken = [self._backlog.popleft() for _ in range(min(_MAX_MERGED, len(self._backlog)))]
                    self._is_writing = bool(taken)
                content = b"".join(map(wire.framed, _merged(taken)))


def _merged(messages: list[wire.Message]) -> list[wire.Message]:
    """Merges adjacent step reports until a report has `_LARGE_STEP` tokens or more. Merged reports cost a slow client
    less work per token."""
    merged: list[wire.Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            isinstance(message, wire.StepReport)
            and isinstance(last, wire.StepReport)
            and len(last.tokens) + len(last.outputs) < _LARGE_STEP
        ):
            merged[-1] = wire.StepReport(
                last.handles + message.handles,
                last.tokens + message.tokens,
                last.outputs + message.outputs,
                last.ended + message.ended,
            )
        else:
            merged.append(message)
    return merged
