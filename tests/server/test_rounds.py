"""Turns in the event loop: everyone gets one, first come first served, and no round lets more in than it has time for."""

from __future__ import annotations

import asyncio
import time

from weft.server.rounds import Rounds
from weft.server.streaming import EventStream


def busy(seconds: float) -> None:
    """Keeps the event loop to itself."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_whoever_is_alone_does_not_wait() -> None:
    async def run() -> None:
        rounds = Rounds()
        turn = rounds.turn()
        try:
            turn.send(None)
        except StopIteration:
            return
        raise AssertionError("it waited")

    asyncio.run(run())


class Plenty:
    """Answers of which there is more whenever some was taken, and taking takes its time."""

    has_more = True

    def __init__(self) -> None:
        self.left = 40
        self.results: list[object] = []

    @property
    def is_over(self) -> bool:
        return self.left == 0

    async def wait(self) -> None:
        pass

    def take(self) -> list[object]:
        self.left -= 1
        busy(0.002)
        return []


def test_one_stream_of_many_answers_lets_everyone_else_have_turns() -> None:
    num_turns = 0

    async def run() -> None:
        async def others() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        stream = EventStream.__new__(EventStream)
        stream._choices, stream._rounds = Plenty(), Rounds()  # type: ignore[assignment]
        beside = asyncio.create_task(others())
        await stream._send_pieces(None)  # type: ignore[arg-type]  # nothing is sent
        beside.cancel()

    asyncio.run(run())
    assert num_turns >= 4, "after 16, 8, 4 and 2 pieces, and then after every few"


def test_everyone_gets_a_turn_in_the_order_of_asking() -> None:
    async def run() -> list[int]:
        rounds, done = Rounds(), []

        async def work(number: int) -> None:
            await rounds.turn()
            done.append(number)

        await asyncio.gather(*(work(number) for number in range(500)))
        return done

    assert asyncio.run(run()) == list(range(500))


def test_a_newcomer_who_is_not_paced_passes_hundreds_who_are() -> None:
    """Each round of the loop lets a few of the three hundred in; a task that needs ten rounds waits for few of them."""

    async def run() -> int:
        rounds, done = Rounds(), []

        async def work() -> None:
            await rounds.turn()
            busy(0.002)
            done.append(1)

        async def ten_rounds() -> int:
            for _ in range(10):
                await asyncio.sleep(0)
            return len(done)

        working = asyncio.gather(*(work() for _ in range(300)))
        seen = await asyncio.create_task(ten_rounds())
        await working
        assert len(done) == 300
        return seen

    assert asyncio.run(run()) < 150


def test_whoever_is_gone_takes_nobodys_turn() -> None:
    async def run() -> None:
        rounds = Rounds()
        tasks = [asyncio.create_task(rounds.turn()) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=60)
        assert not pending and sum(task.cancelled() for task in done) <= 50
        await asyncio.wait_for(rounds.turn(), 60)

    asyncio.run(run())


def test_nothing_is_scheduled_while_nobody_asks() -> None:
    async def run() -> None:
        rounds = Rounds()
        await rounds.turn()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not rounds._is_counting

    asyncio.run(run())
