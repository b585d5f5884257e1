"""Memory of the cache that is taken before it is used: how much, when, and that nothing in it changes."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from weft.backends.cpu.memory_ahead import MemoryAhead
from weft.backends.cpu.step_thread import StepThread
from weft.plan import StepResult

ROW = 96 << 10
MIB = 1 << 20


def resident_bytes(memory: mmap.mmap) -> int:
    """Of a mapping that begins at a page, as Linux counts it."""
    start = f"{np.frombuffer(memory, np.uint8).ctypes.data:x}-"
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if line.startswith(start):
                return next(int(entry.split()[1]) << 10 for entry in lines if entry.startswith("Rss:"))
    raise AssertionError("no such mapping")


def take_all(memory: MemoryAhead) -> int:
    turns = 0
    while memory.is_wanting:
        memory.take_some()
        turns += 1
    return turns


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident")
def test_as_much_is_taken_as_may_be_needed_next_and_no_more() -> None:
    mapped = mmap.mmap(-1, 512 * ROW, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    rows = np.frombuffer(mapped, np.float16).reshape(512, -1)
    memory = MemoryAhead(rows, 8 * MIB)
    assert resident_bytes(mapped) == 0
    assert take_all(memory) == 4, "a large page at a time"
    assert resident_bytes(mapped) == 8 * MIB
    memory.use(8)
    take_all(memory)
    assert resident_bytes(mapped) == 8 * MIB + 8 * ROW
    memory.use(4)
    assert not memory.is_wanting, "what was used once is there"
    memory.use(512)
    assert not memory.is_wanting, "all are in use"


def test_an_array_smaller_than_what_is_to_be_ahead_is_taken_whole_and_nothing_in_it_changes() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 3, 1111)).astype(np.float16)
    before = rows.copy()
    memory = MemoryAhead(rows, 64 * MIB)
    take_all(memory)
    assert np.array_equal(rows, before)


class Noted(MemoryAhead):
    """Notes in which thread it is asked, and how often."""

    def __init__(self, ahead: int) -> None:
        super().__init__(np.zeros((64, ROW // 4), np.float32), ahead)
        self.threads: list[str] = []

    def take_some(self) -> None:
        self.threads.append(threading.current_thread().name)
        super().take_some()


def until(holds: object) -> None:
    assert callable(holds)
    ends = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < ends
        time.sleep(1e-3)


def test_the_thread_of_the_steps_takes_it_while_there_are_none() -> None:
    thread, memory = StepThread("steps"), Noted(4 * MIB)
    thread.take_ahead(memory)
    until(lambda: not memory.is_wanting)
    assert memory.threads == ["steps"] * 2

    def step() -> StepResult:
        memory.use(10)
        return StepResult()

    thread.submit(step).result()
    until(lambda: not memory.is_wanting)
    thread.close()
    assert set(memory.threads) == {"steps"} and len(memory.threads) == 3


def test_steps_that_wait_and_the_end_come_before_it() -> None:
    thread, memory = StepThread("steps"), Noted(64 * ROW)
    may_go_on = threading.Event()

    def first() -> StepResult:
        assert may_go_on.wait(10.0)
        return StepResult()

    steps = [thread.submit(first)]
    thread.take_ahead(memory)
    steps += [thread.submit(StepResult) for _ in range(20)]
    closing = threading.Thread(target=thread.close)
    closing.start()
    until(lambda: not thread._end.alive)
    may_go_on.set()
    closing.join(10.0)
    for step in steps:
        step.result()
    assert not memory.threads
