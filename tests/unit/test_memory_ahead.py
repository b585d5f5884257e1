"""Memory of the cache that is taken before it is used: how much, when, and that nothing in it changes."""

from __future__ import annotations

import threading
import time

import numpy as np

from resident_pages import PAGE, needs_pagemap, present_pages, untouched
from weft.backends.cpu.memory_ahead import MemoryAhead
from weft.backends.cpu.step_thread import StepThread
from weft.plan import StepResult

ROW = 96 << 10
MIB = 1 << 20
LARGE_PAGE = 2 * MIB


def untouched_rows(count: int) -> np.ndarray:
    return untouched(count * ROW).view(np.float16).reshape(count, -1)


def resident_bytes(rows: np.ndarray) -> int:
    return sum(present_pages(rows.reshape(-1).view(np.uint8))) * PAGE


def take_all(memory: MemoryAhead) -> int:
    turns = 0
    while memory.is_wanting:
        memory.take_some()
        turns += 1
    return turns


@needs_pagemap
def test_as_much_is_taken_as_may_be_needed_next_and_no_more() -> None:
    rows = untouched_rows(512)
    memory = MemoryAhead(rows, 8 * MIB)
    assert resident_bytes(rows) == 0
    assert 4 <= take_all(memory) <= 5, "a large page at a time"
    assert 8 * MIB <= resident_bytes(rows) < 8 * MIB + LARGE_PAGE
    memory.use(80)
    take_all(memory)
    assert 80 * ROW + 8 * MIB <= resident_bytes(rows) < 80 * ROW + 8 * MIB + LARGE_PAGE
    memory.use(4)
    assert not memory.is_wanting, "what was used once is there"
    memory.use(512)
    assert not memory.is_wanting, "all are in use"
    assert resident_bytes(rows) == 512 * ROW


@needs_pagemap
def test_what_a_step_needs_is_there_before_it() -> None:
    rows = untouched_rows(512)
    memory = MemoryAhead(rows, 8 * MIB)
    memory.use(50)
    assert 50 * ROW <= resident_bytes(rows) < 50 * ROW + LARGE_PAGE
    assert memory.is_wanting, "what lies behind has time"


class NotingPool:
    """Notes which pieces are taken, as addresses, and in which thread; takes what it is offered where it `has_time`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pieces: list[tuple[int, int]] = []
        self.takers: list[str] = []
        self.beside: list[tuple[int, int]] = []
        self.has_time = False
        self.is_open = False

    def take_pages(self, bytes: np.ndarray) -> None:
        self.pieces.append((bytes.ctypes.data, bytes.ctypes.data + bytes.size))
        self.takers.append(threading.current_thread().name)

    def offer_pages(self, bytes: np.ndarray) -> None:
        assert not self.is_open, "what was offered before is still open"
        assert bytes.size > 0
        self.is_open = True
        if self.has_time:
            self.beside.append((bytes.ctypes.data, bytes.ctypes.data + bytes.size))

    def withdraw_pages(self) -> bool:
        assert self.is_open, "nothing was offered"
        self.is_open = False
        return not self.has_time


class Noted(MemoryAhead):
    def __init__(self, ahead: int, threads: int = 1, num_rows: int = 64) -> None:
        self.pool = NotingPool(threads)
        self.array = np.zeros((num_rows, ROW // 4), np.float32)
        super().__init__(self.array, ahead, self.pool)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return self.pool.pieces

    def step(self, num_rows: int) -> None:
        self.use(num_rows)
        self.end_step()


def test_pieces_follow_one_another_to_the_end_and_no_large_page_is_in_two() -> None:
    memory = Noted(LARGE_PAGE)
    for num_rows in range(0, 65, 5):
        memory.step(num_rows)
        take_all(memory)
    memory.step(64)
    take_all(memory)
    ends = [end for _, end in memory.pieces]
    start = memory.array.ctypes.data
    assert [begin for begin, _ in memory.pieces] == [start, *ends[:-1]]
    assert all(end % LARGE_PAGE == 0 for end in ends[:-1])
    assert ends[-1] == start + memory.array.nbytes


def test_a_step_that_is_short_of_a_page_takes_one_for_each_thread() -> None:
    memory = Noted(0, threads=2)
    memory.step(1)
    [(begin, end)] = memory.pieces
    assert 2 * LARGE_PAGE <= end - begin < 3 * LARGE_PAGE
    memory.step((end - begin) // ROW)
    assert len(memory.pieces) == 1, "these are there"
    memory.step((end - begin) // ROW + 1)
    assert len(memory.pieces) == 2


def test_a_step_with_time_takes_what_two_more_of_its_kind_will_need() -> None:
    memory = Noted(0, num_rows=1000)
    memory.pool.has_time = True
    for num_rows in range(30, 360, 30):
        memory.step(num_rows)
    assert len(memory.pieces) == 1, "only the first came as a surprise"
    every = [*memory.pieces, *memory.pool.beside]
    assert [begin for begin, _ in every[1:]] == [end for _, end in every[:-1]], "one follows the other"
    needed = memory.array.ctypes.data + (330 + 2 * 30) * ROW
    assert needed <= every[-1][1] < needed + LARGE_PAGE
    memory.step(331)
    memory.step(331)
    assert len(every) == len(memory.pieces) + len(memory.pool.beside), "they need no more"


def test_what_no_thread_had_time_for_is_taken_before_the_step_that_needs_it() -> None:
    memory = Noted(0, num_rows=400)
    for num_rows in range(30, 330, 30):
        memory.step(num_rows)
        assert memory.pieces[-1][1] >= memory.array.ctypes.data + num_rows * ROW
        assert not memory.pool.is_open
    memory.pool.has_time = True
    memory.step(300)  # as many as before: nothing is offered, so nothing was taken
    memory.step(301)
    assert memory.pieces[-1][1] >= memory.array.ctypes.data + 301 * ROW


def test_no_step_is_asked_to_take_more_than_it_has_time_for_nor_what_is_not_there() -> None:
    memory = Noted(0, num_rows=1000)
    memory.pool.has_time = True
    memory.step(450)
    memory.step(990)
    memory.step(1000)
    (begin, end), *_ = memory.pool.beside
    assert end - begin <= 8 * LARGE_PAGE
    assert (
        max(end for _, end in memory.pieces + memory.pool.beside)
        == memory.array.ctypes.data + memory.array.nbytes
    )


def test_an_array_smaller_than_what_is_to_be_ahead_is_taken_whole_and_nothing_in_it_changes() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 3, 1111)).astype(np.float16)
    before = rows.copy()
    memory = MemoryAhead(rows, 64 * MIB)
    take_all(memory)
    assert np.array_equal(rows, before)


def until(holds: object) -> None:
    assert callable(holds)
    ends = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < ends
        time.sleep(1e-3)


def test_the_thread_of_the_steps_takes_it_while_there_are_none() -> None:
    thread, memory = StepThread("steps"), Noted(LARGE_PAGE)
    thread.take_ahead(memory)
    until(lambda: not memory.is_wanting)
    before = len(memory.pieces)
    assert before > 0
    in_step: list[int] = []

    def step() -> StepResult:
        memory.step(10)
        in_step.append(len(memory.pieces))
        return StepResult()

    thread.submit(step).result()
    until(lambda: not memory.is_wanting)
    thread.close()
    assert in_step == [before], "these were there"
    assert memory.pieces[-1][1] >= memory.array.ctypes.data + 10 * ROW + LARGE_PAGE
    assert set(memory.pool.takers) == {"steps"}


def test_steps_that_wait_and_the_end_come_before_it() -> None:
    thread, memory = StepThread("steps"), Noted(64 * ROW)
    may_go_on = threading.Event()

    def first() -> StepResult:
        assert may_go_on.wait(60.0)
        return StepResult()

    steps = [thread.submit(first)]
    thread.take_ahead(memory)
    steps += [thread.submit(StepResult) for _ in range(20)]
    closing = threading.Thread(target=thread.close)
    closing.start()
    until(lambda: not thread._end.alive)
    may_go_on.set()
    closing.join(60.0)
    for step in steps:
        step.result()
    assert not memory.pieces
