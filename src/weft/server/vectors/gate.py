"""Fair sharing of an engine that makes vectors: decides which inputs of which request go to the engine next.

A request with thousands of inputs is given to the engine in small groups, and few groups are in the engine at a time. So
a request with one input waits for a few groups, not for thousands of inputs. Clients share the engine by tokens and
weight, and so do the requests of one client (start-time fair queueing, as in `weft.server.admission.fairness`). Idle
work is released only while no other request waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class _Account:
    """The virtual time of a client or of a request: the tokens that it got, divided by its weight."""

    def __init__(self, weight: float, virtual_time: float) -> None:
        self.weight = weight
        self.virtual_time = virtual_time

    def charge(self, num_tokens: int) -> None:
        self.virtual_time += num_tokens / self.weight


class _Client(_Account):
    """One client with open requests."""

    def __init__(self, weight: float, virtual_time: float) -> None:
        super().__init__(weight, virtual_time)
        self.num_open = 0
        self.now = 0.0
        """The virtual time at which one of its requests last got tokens. A new request starts from here."""


class VectorTicket(_Account):
    """One request at the gate. It waits for one group of inputs at a time."""

    def __init__(self, client: _Client, number: int, is_idle_work: bool) -> None:
        super().__init__(1.0, client.now)
        self.client = client
        self.number = number
        self.is_idle_work = is_idle_work
        self.num_tokens = 0
        """Tokens of the group that waits."""
        self.released: asyncio.Future[None] | None = None

    @property
    def rank(self) -> tuple[bool, float, float, int]:
        return self.is_idle_work, self.client.virtual_time, self.virtual_time, self.number


class VectorGate:
    """Keeps at most `max_tokens` tokens in the engine, or one group that has more. Belongs to one event loop."""

    def __init__(self, max_tokens: Callable[[], int]) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._num_requests = 0
        self._clients: dict[str, _Client] = {}
        self._waiting: list[VectorTicket] = []
        self._now = 0.0
        """The virtual time at which a client last got tokens. An idle client gains no credit: it starts from here."""

    @property
    def num_waiting(self) -> int:
        """Requests with a group that waits."""
        return len(self._waiting)

    def enter(self, client_id: str, weight: float = 1.0, *, is_idle_work: bool = False) -> VectorTicket:
        """Adds a request. The caller also calls `leave`."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(weight, self._now)
        if not client.num_open:
            client.virtual_time = max(client.virtual_time, self._now)
        client.num_open += 1
        self._num_requests += 1
        return VectorTicket(client, self._num_requests, is_idle_work)

    async def take(self, ticket: VectorTicket, num_tokens: int) -> None:
        """Waits until a group of inputs with `num_tokens` may go to the engine. The caller then calls `free` for them,
        unless this call was cancelled."""
        ticket.num_tokens = num_tokens
        ticket.released = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._release()
        try:
            await ticket.released
        except asyncio.CancelledError:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            else:  # it was released just before the cancellation
                self.free(num_tokens)
            raise

    def free(self, num_tokens: int) -> None:
        """Records that inputs with `num_tokens` have left the engine."""
        self._num_tokens -= num_tokens
        self._release()

    def leave(self, ticket: VectorTicket) -> None:
        """Removes a request. Forgets clients without requests that would start from the time of the gate anyway."""
        ticket.client.num_open -= 1
        clients = self._clients.items()
        for name in [name for name, one in clients if not one.num_open and one.virtual_time <= self._now]:
            del self._clients[name]

    def _release(self) -> None:
        """Releases waiting groups in order of rank, as long as they fit."""
        while self._waiting:
            ticket = min(self._waiting, key=lambda one: one.rank)
            room = self._max_tokens()
            # Idle work leaves half of the room to requests of clients that arrive later.
            if ticket.is_idle_work:
                room //= 2
            if self._num_tokens and self._num_tokens + ticket.num_tokens > room:
                return
            self._waiting.remove(ticket)
            client = ticket.client
            if not ticket.is_idle_work:
                self._now = max(self._now, client.virtual_time)
                client.now = max(client.now, ticket.virtual_time)
                client.charge(ticket.num_tokens)
            ticket.charge(ticket.num_tokens)
            self._num_tokens += ticket.num_tokens
            assert ticket.released is not None
            if not ticket.released.done():  # else its task was cancelled, and `take` frees the tokens
                ticket.released.set_result(None)
