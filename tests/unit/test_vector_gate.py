"""Fair sharing of an engine that makes vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from weft.server.vectors.gate import VectorGate, VectorTicket

ROOM = 100


def run(work: Callable[[VectorGate], Awaitable[None]]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(work(VectorGate(lambda: ROOM)), 60)

    asyncio.run(in_time())


class Client:
    """One request that asks for groups of `size` tokens, one after the other."""

    def __init__(
        self, gate: VectorGate, ticket: VectorTicket, size: int, order: list[str], name: str
    ) -> None:
        self._gate, self._ticket, self._size = gate, ticket, size
        self._order, self._name = order, name
        self.task = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        while True:
            await self._gate.take(self._ticket, self._size)
            self._order.append(self._name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def shares(gate: VectorGate, clients: list[Client], order: list[str], size: int, rounds: int) -> None:
    """Lets the engine end one group after the other."""
    await settle()
    for _ in range(rounds):
        gate.free(size)
        await settle()
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)


def test_few_tokens_are_in_the_engine_at_a_time() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        client = Client(gate, gate.enter("a"), 30, order, "a")
        await settle()
        assert len(order) == 3 and gate.num_waiting == 1
        client.task.cancel()
        await settle()
        assert gate.num_waiting == 0

    run(work)


def test_a_group_larger_than_the_room_runs_alone() -> None:
    async def work(gate: VectorGate) -> None:
        await gate.take(gate.enter("a"), 3 * ROOM)
        waiting = asyncio.ensure_future(gate.take(gate.enter("a"), 1))
        await settle()
        assert not waiting.done()
        gate.free(3 * ROOM)
        await waiting

    run(work)


def test_clients_share_by_weight_and_not_by_their_number_of_requests() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        clients = [Client(gate, gate.enter("many"), 50, order, "many") for _ in range(10)]
        clients += [Client(gate, gate.enter("heavy", 3.0), 50, order, "heavy")]
        await shares(gate, clients, order, 50, 40)
        late = order[2:]
        assert abs(late.count("heavy") - 3 * late.count("many")) <= 4

    run(work)


def test_a_small_request_overtakes_a_large_one_of_the_same_client() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        large = Client(gate, gate.enter("a"), 50, order, "large")
        await settle()
        for _ in range(20):
            gate.free(50)
            await settle()
        small = asyncio.ensure_future(gate.take(gate.enter("a"), 5))
        await settle()
        before = len(order)
        while not small.done():
            gate.free(50)
            await settle()
        assert len(order) - before <= 1
        await shares(gate, [large], order, 50, 0)

    run(work)


def test_idle_work_waits_for_all_others_and_leaves_room() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        idle = Client(gate, gate.enter("batch", is_idle_work=True), 25, order, "idle")
        await settle()
        assert order == ["idle"] * 2, "half of the room stays free"
        client = Client(gate, gate.enter("a"), 25, order, "client")
        await settle()
        assert order[2:] == ["client"] * 2
        await shares(gate, [client], order, 25, 10)
        assert "idle" not in order[2:]
        idle.task.cancel()
        await asyncio.gather(idle.task, return_exceptions=True)

    run(work)


def test_a_client_that_was_idle_gains_no_credit() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        first = Client(gate, gate.enter("first"), 50, order, "first")
        await settle()
        for _ in range(50):
            gate.free(50)
            await settle()
        second = Client(gate, gate.enter("second"), 50, order, "second")
        start = len(order)
        await shares(gate, [first, second], order, 50, 20)
        late = order[start:]
        assert abs(late.count("first") - late.count("second")) <= 2

    run(work)


def test_a_client_that_comes_back_gains_no_credit() -> None:
    async def work(gate: VectorGate) -> None:
        order: list[str] = []
        early = gate.enter("back")
        await gate.take(early, 80)
        gate.leave(early)  # its virtual time is ahead of the others, so it is not forgotten
        gate.free(80)
        stays = Client(gate, gate.enter("stays"), 50, order, "stays")
        for _ in range(50):
            await settle()
            gate.free(50)
        back = Client(gate, gate.enter("back"), 50, order, "back")
        start = len(order)
        await shares(gate, [stays, back], order, 50, 20)
        late = order[start:]
        assert abs(late.count("stays") - late.count("back")) <= 2

    run(work)


def test_a_wait_that_is_cancelled_leaves_no_tokens_behind() -> None:
    async def work(gate: VectorGate) -> None:
        await gate.take(gate.enter("a"), ROOM)
        waiting = asyncio.ensure_future(gate.take(gate.enter("b"), 10))
        await settle()
        gate.free(ROOM)  # releases `waiting`, whose task has not run since
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(gate.take(gate.enter("c"), ROOM), 1)

    run(work)
