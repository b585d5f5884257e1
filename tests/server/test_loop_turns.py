"""Turns in the event loop: they are granted in FIFO order, and an iteration never does more work than its target time
allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from weft.server.stream.choices import Piece
from weft.server.stream.events import EventStream
from weft.server.stream.loop_turns import LoopTurns


def busy(seconds: float) -> None:
    """Blocks the event loop for this much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_single_wait_returns_at_once() -> None:
    async def run() -> None:
        loop_turns = LoopTurns()
        waiting = loop_turns.wait()
        try:
            waiting.send(None)
        except StopIteration:
            return
        raise AssertionError("it had to wait")

    asyncio.run(run())


class ManyPieces:
    """Fake `Choices` that always has another piece. Taking one takes 2 ms."""

    def __init__(self) -> None:
        self.left = 40
        self.results: list[object] = []
        self.call: Callable[[], object] | None = None

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def call_on_arrival(self, call: Callable[[], object] | None) -> None:
        self.call = call
        if call is not None:
            call()

    def take(self) -> list[Piece]:
        self.left -= 1
        busy(0.002)
        if self.call is not None:
            self.call()
        return [Piece(None, "", (), (), is_last=self.is_over)]  # type: ignore[arg-type]


class NoEvents:
    """Stands in for `AnswerWriter`."""

    def events(self, pieces: list[Piece]) -> bytes:
        return b""


@pytest.mark.parametrize("open_streams", [1, 2])
def test_one_stream_of_many_answers_lets_other_tasks_run(
    open_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns = 0
    monkeypatch.setattr(EventStream, "open_streams", open_streams)

    async def run() -> None:
        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        stream = EventStream.__new__(EventStream)
        stream._choices, stream._loop_turns = ManyPieces(), LoopTurns()  # type: ignore[assignment]
        stream._loop, stream._paused_until, stream._pause_timer = asyncio.get_running_loop(), 0.0, None
        stream._measure = lambda *_: None  # type: ignore[method-assign]
        stream._answer_writer = NoEvents()  # type: ignore[assignment]
        other_task = asyncio.create_task(count_turns())
        await stream._send_pieces(None)  # type: ignore[arg-type]  # nothing is sent
        other_task.cancel()

    asyncio.run(run())
    assert num_turns >= 40, "other tasks run after every piece"


def test_turns_are_granted_in_fifo_order() -> None:
    async def run() -> list[int]:
        loop_turns, done = LoopTurns(), []

        async def work(number: int) -> None:
            await loop_turns.wait()
            done.append(number)

        await asyncio.gather(*(work(number) for number in range(500)))
        return done

    assert asyncio.run(run()) == list(range(500))


def test_calls_and_waiting_tasks_share_the_turns() -> None:
    async def run() -> list[int]:
        loop_turns, done = LoopTurns(), []

        async def work(number: int) -> None:
            await loop_turns.wait()
            done.append(number)

        tasks = []
        for number in range(0, 200, 2):
            tasks.append(asyncio.create_task(work(number)))
            await asyncio.sleep(0)
            before = len(done)
            loop_turns.call_in_turn(lambda number=number: done.append(number + 1))  # type: ignore[misc]
            assert len(done) == before, "the call must be deferred"
        await asyncio.gather(*tasks)
        while len(done) < 200:
            await asyncio.sleep(0)
        return done

    done = asyncio.run(run())
    assert sorted(done) == list(range(200))
    assert done[1::2] == sorted(done[1::2]), "calls keep their order"


def test_no_iteration_does_more_work_than_its_target_time_allows() -> None:
    async def run() -> list[int]:
        loop_turns, done = LoopTurns(), []

        def work() -> None:
            busy(0.002)
            done.append(1)

        for _ in range(100):
            loop_turns.call_in_turn(work)
        per_iteration = []
        while len(done) < 100:
            before = len(done)
            await asyncio.sleep(0)
            per_iteration.append(len(done) - before)
        return per_iteration

    per_iteration = asyncio.run(run())
    assert max(per_iteration) <= 17 and max(per_iteration[8:]) <= 4


def test_the_number_of_turns_grows_only_if_work_was_left_over() -> None:
    """Two streams for hours, then hundreds at once."""

    async def run() -> list[int]:
        loop_turns, called, per_iteration = LoopTurns(), 0, []

        def work() -> None:
            nonlocal called
            called += 1

        for _ in range(1000):
            loop_turns.call_in_turn(work)
            loop_turns.call_in_turn(work)
            await asyncio.sleep(0)
        assert called == 2000
        for _ in range(400):
            loop_turns.call_in_turn(work)
        while called < 2400:
            before = called
            await asyncio.sleep(0)
            per_iteration.append(called - before)
        return per_iteration

    assert max(asyncio.run(run())) < 100


def test_a_long_iteration_lowers_the_number_of_turns_even_if_no_work_is_left() -> None:
    async def run() -> tuple[int, int]:
        loop_turns, done = LoopTurns(), []

        def work() -> None:
            busy(0.002)
            done.append(1)

        num_done = []
        for _ in range(2):
            done.clear()
            for _ in range(10):
                loop_turns.call_in_turn(work)
            await asyncio.sleep(0)
            num_done.append(len(done))
            while len(done) < 10:
                await asyncio.sleep(0)
        return num_done[0], num_done[1]

    first, second = asyncio.run(run())
    assert first == 10 > second


def test_work_that_raises_does_not_affect_other_work() -> None:
    async def run() -> None:
        loop_turns, done = LoopTurns(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        loop_turns.call_in_turn(lambda: 1 // 0)
        for number in range(3):
            loop_turns.call_in_turn(lambda number=number: done.append(number))  # type: ignore[misc]
        while len(done) < 3:
            await asyncio.sleep(0)
        await asyncio.wait_for(loop_turns.wait(), 60)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_task_without_turns_overtakes_hundreds_that_wait_for_one() -> None:
    """Each iteration grants a few of the 300 turns. A task that needs ten iterations waits for few of them."""

    async def run() -> int:
        loop_turns, done = LoopTurns(), []

        async def work() -> None:
            await loop_turns.wait()
            busy(0.002)
            done.append(1)

        async def ten_iterations() -> int:
            for _ in range(10):
                await asyncio.sleep(0)
            return len(done)

        working = asyncio.gather(*(work() for _ in range(300)))
        seen = await asyncio.create_task(ten_iterations())
        await working
        assert len(done) == 300
        return seen

    assert asyncio.run(run()) < 150


def test_cancelled_tasks_use_no_turns() -> None:
    async def run() -> None:
        loop_turns = LoopTurns()
        tasks = [asyncio.create_task(loop_turns.wait()) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=60)
        assert not pending and sum(task.cancelled() for task in done) <= 50
        await asyncio.wait_for(loop_turns.wait(), 60)

    asyncio.run(run())


def test_nothing_is_scheduled_without_work() -> None:
    async def run() -> None:
        loop_turns = LoopTurns()
        await loop_turns.wait()
        loop_turns.call_in_turn(lambda: None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not loop_turns._is_counting

    asyncio.run(run())
