"""Sends the lines of batches to the server itself. A line is sent again while the server has no room for it, no disk space
for what it stores, or no running engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from weft.engine.ipc.client import EngineState
from weft.server.admission.keys import ApiKey
from weft.server.api.services import Services
from weft.server.internal import InternalReply, InternalRequest

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 15.0
_LOOK_SECONDS = 0.1
_MAX_CRASHES = 3
_RETRIED = (429, 503, 507)


class LineSender:
    """Sends lines. All batches of a server share it."""

    def __init__(self, services: Services, is_draining: Callable[[], bool]) -> None:
        self._services = services
        self._is_draining = is_draining
        self._alone = asyncio.Lock()

    async def send(self, endpoint: str, body: bytes, key: ApiKey | None) -> InternalReply:
        """Returns the first response whose status is not one of `_RETRIED`.

        If the engine crashes, any line in flight may be the cause. After one crash, a line is sent together with others
        again: the cause is often something else. After two, it waits until no other line with two crashes is in flight.
        After `_MAX_CRASHES`, the 503 is its result.
        """
        request = InternalRequest(key, is_idle_work=True)
        delay, crashes = _FIRST_DELAY, 0
        while True:
            async with self._alone if crashes > 1 else nullcontext():
                await self._wait_until_ready(endpoint)
                reply = await self._services.send_internal(endpoint, body, request)
            if reply.status not in _RETRIED:
                return reply
            is_dead = not self._has_engine(endpoint)
            # While the server drains, it stops the engine itself. That is no crash.
            if reply.status == 503 and is_dead and not self._is_draining():
                crashes += 1
                if crashes == _MAX_CRASHES:
                    return reply
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    def _has_engine(self, endpoint: str) -> bool:
        """Whether the engine of this route is ready. True if there is no model for the route: its lines then get errors at
        once."""
        engine = self._services.models.engine_of_route(endpoint)
        return engine is None or engine.state is EngineState.READY

    async def _wait_until_ready(self, endpoint: str) -> None:
        """Waits until the engine is ready. Never returns while the server drains: the lines run after its restart."""
        while self._is_draining() or not self._has_engine(endpoint):
            await asyncio.sleep(_LOOK_SECONDS)
