"""Work slots: their order, and that no slot is lost when work is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from weft.server.text_work.work_slots import WorkSlots

CHEAP, COSTLY = 0.01, 1.0


class Run:
    """Work that records its name when it gets a slot, and keeps the slot until `end`."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.slots = WorkSlots(count, lambda: self.now)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, name: str, cost: float, client_id: str = "") -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, cost, client_id))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def end_all(self) -> None:
        for name in self._ends:
            self._ends[name].set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _work(self, name: str, cost: float, client_id: str) -> None:
        await self.slots.take(client_id, cost)
        self.begun.append(name)
        try:
            await self._ends[name].wait()
        finally:
            self.slots.free(cost)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(count: int, use: Callable[[Run], Awaitable[None]]) -> list[str]:
    async def whole() -> list[str]:
        work = Run(count)
        await use(work)
        await work.end_all()
        return work.begun

    return asyncio.run(whole())


def test_cheap_work_overtakes_costly_work_that_has_not_begun() -> None:
    async def use(work: Run) -> None:
        for number in range(20):
            await work.start(f"costly {number}", COSTLY)
        work.now = 0.5
        await work.start("cheap", CHEAP)
        work.now = 0.6
        await work.end("costly 0")

    assert run(1, use)[:2] == ["costly 0", "cheap"]


def test_costly_work_does_not_starve() -> None:
    async def use(work: Run) -> None:
        await work.start("first", CHEAP)
        await work.start("costly", 10 * CHEAP)
        work.now = 30 * CHEAP
        await work.start("late", CHEAP)
        work.now = 32 * CHEAP  # "costly" waited for 3.2 times its cost, "late" for 2 times
        await work.end("first")

    assert run(1, use)[:2] == ["first", "costly"]


def test_costly_work_leaves_one_of_several_slots_to_cheap_work() -> None:
    async def use(work: Run) -> None:
        for number in range(4):
            await work.start(f"costly {number}", COSTLY)
        assert work.begun == ["costly 0"]
        await work.start("cheap", CHEAP)
        assert work.begun == ["costly 0", "cheap"]
        await work.end("costly 0")
        assert work.begun[2:] == ["costly 1"]

    assert len(run(2, use)) == 5


def test_clients_share_the_slots_however_much_one_of_them_sends() -> None:
    async def use(work: Run) -> None:
        for number in range(20):
            await work.start(f"a{number}", CHEAP, "a")
        for number in range(3):
            await work.start(f"b{number}", CHEAP, "b")
        for name in ("a0", "b0", "a1", "b1", "a2"):
            await work.end(name)

    begun = run(1, use)
    assert begun[0] == "a0" and begun.index("b2") <= 6, begun
    assert len(begun) == 23


def test_an_idle_client_saves_up_nothing() -> None:
    async def use(work: Run) -> None:
        await work.start("a0", CHEAP, "a")
        for number in range(1, 10):
            await work.start(f"a{number}", CHEAP, "a")
            await work.end(f"a{number - 1}")
        for number in range(5):
            await work.start(f"b{number}", CHEAP, "b")
            await work.start(f"a{10 + number}", CHEAP, "a")
        for name in ("a9", "b0", "b1"):
            await work.end(name)

    begun = run(1, use)
    assert begun[10] == "b0" and "a10" in begun[11:13], begun


def test_cancelled_work_leaves_its_slot_to_the_next() -> None:
    async def use(work: Run) -> None:
        for name in ("first", "waits", "leaves too", "last"):
            await work.start(name, COSTLY)
        work.tasks["waits"].cancel()
        await settle()
        # The slot is granted and the work cancelled in the same iteration.
        work._ends["first"].set()
        await asyncio.sleep(0)
        work.tasks["leaves too"].cancel()
        await settle()

    assert [name for name in run(1, use) if name != "leaves too"] == ["first", "last"]


def test_no_slot_is_lost_at_whatever_moment_work_is_cancelled() -> None:
    async def use(work: Run) -> None:
        for steps in range(6):
            first, second, third = (f"{steps}.{number}" for number in range(3))
            for name in (first, second, third):
                await work.start(name, COSTLY)
            work._ends[first].set()
            for _ in range(steps):
                await asyncio.sleep(0)
            work.tasks[second].cancel()
            await settle()
            assert work.begun[-1] == third
            await work.end(third)

    run(1, use)
