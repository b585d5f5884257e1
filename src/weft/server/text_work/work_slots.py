"""Slots for work in threads and worker processes, and the order in which waiting work gets them."""

from __future__ import annotations

import asyncio
import time

from weft.clock import Clock

CHEAP_SECONDS = 0.05
"""Work with at most this expected cost is cheap; other work is costly."""
_LEAST_SECONDS = 1e-4


class _WaitingWork:
    def __init__(self, client_id: str, cost: float, since: float) -> None:
        self.client_id = client_id
        self.cost = max(cost, _LEAST_SECONDS)
        self.since = since
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class WorkSlots:
    """Limits concurrent work to `count` slots. Belongs to one event loop.

    Clients share the slots by the seconds that their work costs (start-time fair queueing). Within one client, the work
    with the highest ratio of waiting time to cost is next. Cheap work thus overtakes costly work, and costly work never
    starves. If there are several slots, costly work leaves one free for cheap work.
    """

    def __init__(self, count: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_free = count
        self._num_for_costly = max(1, count - 1)
        self._waiting: list[_WaitingWork] = []
        self._virtual_times: dict[str, float] = {}
        """Client -> the expected seconds of work that it got slots for. Cleared when no work waits."""
        self._virtual_now = 0.0
        """The largest virtual time at which a slot was granted. A client without waiting work starts from here."""

    async def take(self, client_id: str, cost: float) -> None:
        """Waits for a slot for work of about `cost` seconds. The caller then calls `free` with the same cost, unless
        this call was cancelled."""
        waiting = _WaitingWork(client_id, cost, self._clock())
        if not self._waiting:
            self._virtual_times.clear()
            self._virtual_now = 0.0
        if all(other.client_id != client_id for other in self._waiting):
            self._virtual_times[client_id] = max(self._virtual_times.get(client_id, 0.0), self._virtual_now)
        self._waiting.append(waiting)
        self._grant_slots()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():  # the slot was granted just before the cancellation
                self.free(cost)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
            raise

    def free(self, cost: float) -> None:
        self._num_free += 1
        self._num_for_costly += cost > CHEAP_SECONDS
        self._grant_slots()

    def _grant_slots(self) -> None:
        while self._num_free and (waiting := self._next()) is not None:
            self._waiting.remove(waiting)
            if waiting.granted.done():  # its task was cancelled and has not run since
                continue
            self._num_free -= 1
            self._num_for_costly -= waiting.cost > CHEAP_SECONDS
            self._virtual_now = max(self._virtual_now, self._virtual_times[waiting.client_id])
            self._virtual_times[waiting.client_id] += waiting.cost
            waiting.granted.set_result(None)

    def _next(self) -> _WaitingWork | None:
        now = self._clock()
        eligible = (one for one in self._waiting if self._num_for_costly or one.cost <= CHEAP_SECONDS)
        return min(
            eligible,
            key=lambda one: (
                self._virtual_times[one.client_id],
                one.cost / (now - one.since + _LEAST_SECONDS),
            ),
            default=None,
        )
