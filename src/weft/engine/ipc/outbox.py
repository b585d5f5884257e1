"""What the engine's process has to say: written at once where the connection has room, else by a thread of its own.

Steps of one stream take milliseconds, and a thread that is woken for each of their messages costs as much as writing
them does. A client that reads slowly still makes no step wait: what does not fit is left to the thread.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from weft.engine.ipc import wire

_LARGE_STEP = 256
_MOST_TOGETHER = 16
"""Messages that are written at once where so many wait."""


class Outbox:
    """Owns the writing end of a connection. `send` is called by any thread and never waits for the reader."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._begun = b""
        """The rest of what did not fit."""
        self._unsent: deque[wire.Message] = deque()
        self._is_behind = False
        """The thread has something to write: what is sent now has to wait behind it."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="weft-writer", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return self._thread.native_id or 0

    def send(self, message: wire.Message) -> None:
        with self._changed:
            if self._is_closed:
                return
            if self._is_behind:
                self._unsent.append(message)
                return
            content = wire.framed(message)
            try:
                num_sent = self._connection.send(content, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_sent = 0
            except OSError:  # gone; the reader finds out and ends the engine
                self._is_closed = True
                return
            if num_sent < len(content):
                self._begun, self._is_behind = content[num_sent:], True
                self._changed.notify()

    def close(self, patience: float) -> None:
        """Nothing more is taken; what was is written, for as long as that may take."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(patience)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_behind or self._is_closed)
                if not self._is_behind:
                    return
                content, self._begun = self._begun, b""
            while content:
                try:
                    self._connection.sendall(content)
                except OSError:
                    with self._changed:
                        self._is_closed, self._is_behind = True, False
                        self._unsent.clear()
                    return
                with self._changed:
                    taken = [self._unsent.popleft() for _ in range(min(_MOST_TOGETHER, len(self._unsent)))]
                    self._is_behind = bool(taken)
                content = b"".join(map(wire.framed, _merged(taken)))


def _merged(messages: list[wire.Message]) -> list[wire.Message]:
    """The same with neighbouring steps in one, up to a size that a client takes in its stride: one that is behind then
    has less to do for each token."""
    merged: list[wire.Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            isinstance(message, wire.StepReport)
            and isinstance(last, wire.StepReport)
            and len(last.tokens) + len(last.outputs) < _LARGE_STEP
        ):
            merged[-1] = wire.StepReport(
                last.ids + message.ids,
                last.tokens + message.tokens,
                last.outputs + message.outputs,
                last.ended + message.ended,
            )
        else:
            merged.append(message)
    return merged
