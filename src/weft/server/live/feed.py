"""The frames of the live page: one task asks the engine for them, and each viewer takes the newest one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec

from weft.engine.ipc.client import EngineClient, EngineState
from weft.errors import WeftError
from weft.live import MAX_REQUESTS
from weft.server.errors import ApiError
from weft.server.live.held import RequestsOfServer
from weft.server.live.info import REPLICA

MAX_VIEWERS = 32
FRAME_SECONDS = 0.1
"""At most ten frames a second."""
_STATE_SECONDS = 1.0
"""While the engine sends no frames, its state is published this often."""
_SERVER_REST, _ENGINE_REST = 20, 50
"""The next frame is made after this many times the CPU time of the last one. So frames use at most a twentieth of the
event loop, and a fiftieth of the engine's interpreter."""
_RETRY_SECONDS = 10.0


class Viewer:
    """One connection. It holds one frame: a frame that is not taken in time is replaced by the next one."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._has_ended = False
        self._changed = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self._newest = frame
        self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def take(self) -> bytes | None:
        """Waits for a frame that was not taken before. None: the feed has ended."""
        await self._changed.wait()
        frame, self._newest = self._newest, None
        if not self._has_ended:
            self._changed.clear()
        return None if self._has_ended else frame


class LiveFeed:
    """Owns the viewers, and the task that makes frames while there are viewers. Belongs to one event loop."""

    def __init__(
        self,
        model: str,
        engine: EngineClient,
        requests_of_server: Callable[[], RequestsOfServer],
        feedback: Callable[[], dict[str, int] | None] = lambda: None,
    ) -> None:
        """`feedback`: the numbers of kept responses and of feedback; None: no feedback is kept."""
        self._model = model
        self._engine = engine
        self._requests_of_server = requests_of_server
        self._feedback = feedback
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Adds a viewer. Raises a 429 if there are too many."""
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", code="draining")
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{len(self._viewers)} viewers read live data; allowed: {MAX_VIEWERS}; close another live page"
            raise ApiError(429, message, code="too_many_viewers", retry_after=_RETRY_SECONDS)
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="live feed")
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def close(self) -> None:
        """Ends the streams of all viewers."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        """Publishes frames until the last viewer has left."""
        try:
            while self._viewers:
                began = time.monotonic()
                found = await self._frame() if self._engine.is_responding else None
                if found is None:
                    self._publish()
                    await asyncio.sleep(_STATE_SECONDS)
                    continue
                frame, engine_seconds = found
                server_seconds = self._publish(frame)
                elapsed = time.monotonic() - began
                rest = max(_SERVER_REST * server_seconds, _ENGINE_REST * engine_seconds)
                await asyncio.sleep(max(FRAME_SECONDS - elapsed, rest))
        except BaseException:
            for viewer in self._viewers:  # otherwise they would wait for frames that never come
                viewer.end()
            raise

    async def _frame(self) -> tuple[bytes, float] | None:
        """The next frame of the engine, and the CPU seconds that it took there. None: the engine's process ended.

        While the engine does not respond, publishes its state. The request for the frame stays open, so that the first
        frame after a pause has the steps and events of the pause.
        """
        asked = asyncio.ensure_future(self._engine.live_frame())
        try:
            while not (await asyncio.wait((asked,), timeout=_STATE_SECONDS))[0]:
                if not self._engine.is_responding:
                    self._publish()
            return asked.result()
        except WeftError:
            return None
        finally:
            asked.cancel()

    def _publish(self, frame: bytes | None = None) -> float:
        """Sends the viewers a frame of the engine with the fields that the server adds, or only these fields. Returns the CPU
        seconds that this took."""
        began = time.thread_time()
        if frame is not None:
            state = "ready"
        else:
            state = "silent" if self._engine.state is EngineState.READY else "starting"
        requests = self._requests_of_server()
        fields = msgspec.json.encode(
            {
                "model": self._model,
                "replica": REPLICA,
                "engine": state,
                "keys": requests.keys,
                "held": requests.held,
                "num_held": requests.num_held,
                "open": requests.num_open,
                "readers": list(islice(self._engine.shared_answers.live_readers(), MAX_REQUESTS)),
                "feedback": self._feedback(),
            }
        )
        content = fields if frame is None else fields[:-1] + b"," + frame[1:]
        event = b"data: " + content + b"\n\n"
        for viewer in self._viewers:
            viewer.put(event)
        return time.thread_time() - began
