"""Streams answers as events. The first token is sent at once; under load an event has several tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weft.errors import WeftError
from weft.request import GenerationResult
from weft.server.api.answer_format import AnswerWriter
from weft.server.errors import ApiError, as_api_error
from weft.server.http.protocol import WRITER, BodyWriter
from weft.server.metrics import TokenTimes
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.loop_turns import LoopTurns

_SECONDS_PER_EVENT = 1e-4
"""Time to write one event. After an event, a stream pauses for this time multiplied by the number of open streams, so
that the event loop has time for all. A single stream does not pause. With hundreds of streams, an event has several
tokens."""
_MAX_PAUSE = 0.1
_MIN_PAUSE = 1e-3

T = TypeVar("T")


class Disconnected(Exception):
    """The client has disconnected."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises Disconnected."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
        # A cancelled task releases its resources; wait for that before the caller continues.
        await asyncio.gather(working, watching, return_exceptions=True)
        # The traceback of an error refers to this frame: these variables would close a reference cycle.
        del working, watching, task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams `choices` to the client, and cancels them if it disconnects."""

    open_streams = 0

    def __init__(
        self,
        choices: Choices,
        writer: AnswerWriter,
        times: TokenTimes,
        *,
        loop_turns: LoopTurns,
        began: float,
        silence_seconds: float,
        headers: dict[str, str],
        finish: Callable[[Choices], Awaitable[None]],
        on_end: Callable[[list[GenerationResult] | ApiError | None], object],
    ) -> None:
        """`finish` is awaited after the last piece of the answers, before the last bytes are sent."""
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = writer.stream_type
        del self.headers["content-length"]
        self._choices = choices
        self._answer_writer = writer
        self._times = times
        self._loop_turns = loop_turns
        self._finish = finish
        self._on_end = on_end
        self._last = began
        """When the last pieces were written. Before the first ones: when the request began."""
        self._silence_seconds = silence_seconds
        self._sent_at = 0.0
        """When the last bytes were written."""
        self._silence_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._paused_until = 0.0
        self._pause_timer: asyncio.TimerHandle | None = None
        self._writer: BodyWriter | None = None
        self._stopped: asyncio.Future[bytes] | None = None
        """Its result is set when direct writing stops: b"" at the end of the answers, else the bytes that the writer did
        not accept."""
        self._has_events = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        EventStream.open_streams += 1
        self._writer = scope.get("state", {}).get(WRITER)
        outcome: list[GenerationResult] | ApiError | None = None
        try:
            outcome = await unless_disconnected(receive, self._send_all(send))
        except Disconnected:
            pass
        except Exception:
            outcome = ApiError.internal_error()
            raise
        finally:
            EventStream.open_streams -= 1
            self._choices.cancel()
            self._on_end(outcome)

    async def _send_all(self, send: Send) -> list[GenerationResult] | ApiError:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._writer is not None and not self._writer.accepts_chunks:
            self._writer = None
        if first := self._answer_writer.begin():
            await send(_body(first))
        self._sent_at = time.monotonic()
        self._silence_timer = self._loop.call_later(self._silence_seconds, self._end_silence)
        outcome: list[GenerationResult] | ApiError
        try:
            outcome = await self._send_pieces(send)
            await self._finish(self._choices)
        except WeftError as error:
            outcome = as_api_error(error)
        except ApiError as error:
            outcome = error.with_traceback(None)  # it refers to this frame: a reference cycle
        finally:
            if self._silence_timer is not None:
                self._silence_timer.cancel()
        # The status line is sent already, so an error is sent as the last event.
        if isinstance(outcome, ApiError):
            last = self._answer_writer.error(outcome)
        else:
            last = self._answer_writer.end(self._choices)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return outcome

    async def _send_pieces(self, send: Send) -> list[GenerationResult]:
        """Waits for the end of the stream, and sends what the socket did not accept at once. `_write` writes all other
        pieces when they arrive. Waking this task for a piece would cost more than writing the piece."""
        choices = self._choices
        while not choices.is_over:
            self._stopped = self._loop.create_future()
            choices.call_on_arrival(self._schedule_write)
            try:
                unsent = await self._stopped
            finally:
                choices.call_on_arrival(None)
                if self._pause_timer is not None:
                    self._pause_timer.cancel()
                # An error in the future has a traceback that refers to this stream: a reference cycle, broken here.
                self._stopped = self._pause_timer = None
            if unsent:
                await send(_body(unsent))
        return choices.results

    def _schedule_write(self) -> None:
        """Called when pieces arrive. Schedules `_write` after the pause. If other streams are open, `_write` waits for
        a turn."""
        pause = self._paused_until - time.monotonic()
        if pause > 0:
            self._pause_timer = self._loop.call_later(pause, self._loop_turns.call_in_turn, self._write)
        elif EventStream.open_streams > 1:
            self._loop_turns.call_in_turn(self._write)
        else:
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Writes the pieces that have arrived. Passes an error to `_send_pieces` and does not raise it."""
        if self._stopped is None or self._stopped.done():
            return
        now = time.monotonic()
        pause = min(_SECONDS_PER_EVENT * EventStream.open_streams, _MAX_PAUSE)
        self._paused_until = now + pause if pause > _MIN_PAUSE else 0.0
        try:
            pieces = self._choices.take()
            if not pieces:
                return
            self._measure(pieces, now)
            content = self._answer_writer.events(pieces)
            # A writer may hold text back, for example until a call is complete. For the client that is silence.
            if content:
                self._sent_at = now
            if content and not (self._writer is not None and self._writer.write(content)):
                self._stopped.set_result(content)
            elif pieces[-1].is_last and self._choices.is_over:
                self._stopped.set_result(b"")
        except Exception as error:
            self._stopped.set_exception(error)

    def _end_silence(self) -> None:
        """Sends an event if nothing was sent for `silence_seconds`, and sets the timer again."""
        now = time.monotonic()
        wait = self._sent_at + self._silence_seconds - now
        if wait <= 0:
            wait = self._silence_seconds
            if self._stopped is not None and not self._stopped.done():
                self._sent_at = now
                content = self._answer_writer.keep_alive()
                if content and not (self._writer is not None and self._writer.write(content)):
                    self._stopped.set_result(content)
        self._silence_timer = self._loop.call_later(wait, self._end_silence)

    def _measure(self, pieces: list[Piece], now: float) -> None:
        num_tokens = len(pieces[0].tokens) if len(pieces) == 1 else sum(len(piece.tokens) for piece in pieces)
        if num_tokens and not self._has_events:
            self._times.first_token(now - self._last)
        elif num_tokens:
            self._times.delivery(now - self._last, num_tokens)
        self._last = now
        self._has_events = True


def _body(content: bytes) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": True}
