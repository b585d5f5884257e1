"""Prefaulting of cache memory: how much, when, and that the content does not change."""

from __future__ import annotations

import threading
import time

import numpy as np

from resident_pages import PAGE, needs_pagemap, present_pages, untouched
from weft.backends.cpu.prefault import Prefaulter
from weft.backends.cpu.step_thread import StepThread
from weft.plan import StepResult

ROW = 96 << 10
MIB = 1 << 20
LARGE_PAGE = 2 * MIB


def untouched_rows(count: int) -> np.ndarray:
    return untouched(count * ROW).view(np.float16).reshape(count, -1)


def resident_bytes(rows: np.ndarray) -> int:
    return sum(present_pages(rows.reshape(-1).view(np.uint8))) * PAGE


def prefault_all(memory: Prefaulter) -> int:
    calls = 0
    while memory.needs_more:
        memory.prefault_some()
        calls += 1
    return calls


@needs_pagemap
def test_the_stated_bytes_after_the_used_rows_are_prefaulted_and_no_more() -> None:
    rows = untouched_rows(512)
    memory = Prefaulter(rows, 8 * MIB)
    assert resident_bytes(rows) == 0
    assert 4 <= prefault_all(memory) <= 5, "a large page at a time"
    assert 8 * MIB <= resident_bytes(rows) < 8 * MIB + LARGE_PAGE
    memory.use(80)
    prefault_all(memory)
    assert 80 * ROW + 8 * MIB <= resident_bytes(rows) < 80 * ROW + 8 * MIB + LARGE_PAGE
    memory.use(4)
    assert not memory.needs_more, "rows that were used once stay resident"
    memory.use(512)
    assert not memory.needs_more, "all rows are in use"
    assert resident_bytes(rows) == 512 * ROW


@needs_pagemap
def test_the_rows_of_a_step_are_resident_before_it_runs() -> None:
    rows = untouched_rows(512)
    memory = Prefaulter(rows, 8 * MIB)
    memory.use(50)
    assert 50 * ROW <= resident_bytes(rows) < 50 * ROW + LARGE_PAGE
    assert memory.needs_more, "the rows after them can wait"


class FakePool:
    """Records the address ranges that are prefaulted, and the threads. Prefaults offered ranges while it `has_time`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.ranges: list[tuple[int, int]] = []
        self.thread_names: list[str] = []
        self.ranges_during_steps: list[tuple[int, int]] = []
        self.has_time = False
        self.is_open = False

    def take_pages(self, bytes: np.ndarray) -> None:
        self.ranges.append((bytes.ctypes.data, bytes.ctypes.data + bytes.size))
        self.thread_names.append(threading.current_thread().name)

    def offer_pages(self, bytes: np.ndarray) -> None:
        assert not self.is_open, "an earlier offer is still open"
        assert bytes.size > 0
        self.is_open = True
        if self.has_time:
            self.ranges_during_steps.append((bytes.ctypes.data, bytes.ctypes.data + bytes.size))

    def withdraw_pages(self) -> bool:
        assert self.is_open, "nothing was offered"
        self.is_open = False
        return not self.has_time


class RecordedPrefaulter(Prefaulter):
    def __init__(self, ahead: int, threads: int = 1, num_rows: int = 64) -> None:
        self.pool = FakePool(threads)
        self.array = np.zeros((num_rows, ROW // 4), np.float32)
        super().__init__(self.array, ahead, self.pool)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return self.pool.ranges

    def step(self, num_rows: int) -> None:
        self.use(num_rows)
        self.end_step()


def test_ranges_follow_one_another_to_the_end_and_no_large_page_is_in_two() -> None:
    memory = RecordedPrefaulter(LARGE_PAGE)
    for num_rows in range(0, 65, 5):
        memory.step(num_rows)
        prefault_all(memory)
    memory.step(64)
    prefault_all(memory)
    ends = [end for _, end in memory.ranges]
    start = memory.array.ctypes.data
    assert [begin for begin, _ in memory.ranges] == [start, *ends[:-1]]
    assert all(end % LARGE_PAGE == 0 for end in ends[:-1])
    assert ends[-1] == start + memory.array.nbytes


def test_a_step_that_lacks_a_page_prefaults_one_for_each_thread() -> None:
    memory = RecordedPrefaulter(0, threads=2)
    memory.step(1)
    [(begin, end)] = memory.ranges
    assert 2 * LARGE_PAGE <= end - begin < 3 * LARGE_PAGE
    memory.step((end - begin) // ROW)
    assert len(memory.ranges) == 1, "these rows are prefaulted already"
    memory.step((end - begin) // ROW + 1)
    assert len(memory.ranges) == 2


def test_a_pool_with_time_prefaults_during_a_step_what_two_more_such_steps_need() -> None:
    memory = RecordedPrefaulter(0, num_rows=1000)
    memory.pool.has_time = True
    for num_rows in range(30, 360, 30):
        memory.step(num_rows)
    assert len(memory.ranges) == 1, "only the first step had to prefault its own rows"
    ranges = [*memory.ranges, *memory.pool.ranges_during_steps]
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]], "the ranges have no gaps"
    needed = memory.array.ctypes.data + (330 + 2 * 30) * ROW
    assert needed <= ranges[-1][1] < needed + LARGE_PAGE
    memory.step(331)
    memory.step(331)
    assert len(ranges) == len(memory.ranges) + len(memory.pool.ranges_during_steps), "nothing more is needed"


def test_offered_pages_that_no_thread_prefaulted_are_prefaulted_before_the_step_that_needs_them() -> None:
    memory = RecordedPrefaulter(0, num_rows=400)
    for num_rows in range(30, 330, 30):
        memory.step(num_rows)
        assert memory.ranges[-1][1] >= memory.array.ctypes.data + num_rows * ROW
        assert not memory.pool.is_open
    memory.pool.has_time = True
    memory.step(300)  # no new rows: nothing is offered
    memory.step(301)
    assert memory.ranges[-1][1] >= memory.array.ctypes.data + 301 * ROW


def test_an_offer_has_at_most_eight_large_pages_and_ends_with_the_array() -> None:
    memory = RecordedPrefaulter(0, num_rows=1000)
    memory.pool.has_time = True
    memory.step(450)
    memory.step(990)
    memory.step(1000)
    (begin, end), *_ = memory.pool.ranges_during_steps
    assert end - begin <= 8 * LARGE_PAGE
    assert (
        max(end for _, end in memory.ranges + memory.pool.ranges_during_steps)
        == memory.array.ctypes.data + memory.array.nbytes
    )


def test_an_array_smaller_than_the_bytes_ahead_is_prefaulted_whole_and_keeps_its_content() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 3, 1111)).astype(np.float16)
    before = rows.copy()
    memory = Prefaulter(rows, 64 * MIB)
    prefault_all(memory)
    assert np.array_equal(rows, before)


def until(holds: object) -> None:
    assert callable(holds)
    ends = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < ends
        time.sleep(1e-3)


def test_the_step_thread_prefaults_while_it_has_no_steps() -> None:
    thread, memory = StepThread("steps"), RecordedPrefaulter(LARGE_PAGE)
    thread.prefault_when_idle(memory)
    until(lambda: not memory.needs_more)
    before = len(memory.ranges)
    assert before > 0
    in_step: list[int] = []

    def step() -> StepResult:
        memory.step(10)
        in_step.append(len(memory.ranges))
        return StepResult()

    thread.submit(step).result()
    until(lambda: not memory.needs_more)
    thread.close()
    assert in_step == [before], "the step found its rows prefaulted"
    assert memory.ranges[-1][1] >= memory.array.ctypes.data + 10 * ROW + LARGE_PAGE
    assert set(memory.pool.thread_names) == {"steps"}


def test_queued_steps_and_closing_come_before_prefaulting() -> None:
    thread, memory = StepThread("steps"), RecordedPrefaulter(64 * ROW)
    may_continue = threading.Event()

    def first() -> StepResult:
        assert may_continue.wait(60.0)
        return StepResult()

    steps = [thread.submit(first)]
    thread.prefault_when_idle(memory)
    steps += [thread.submit(StepResult) for _ in range(20)]
    closing = threading.Thread(target=thread.close)
    closing.start()
    until(lambda: not thread._end.alive)
    may_continue.set()
    closing.join(60.0)
    for step in steps:
        step.result()
    assert not memory.ranges
