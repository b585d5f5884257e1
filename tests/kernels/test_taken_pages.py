"""Memory that the threads of a pool take from the system: all of it is there then, nothing else, and what it holds stays."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

_kernels = pytest.importorskip("weft._kernels")

PAGE = mmap.PAGESIZE
LARGE_PAGE = 2 << 20


def present_pages(memory: np.ndarray) -> list[bool]:
    """Of an array that begins at a page: which of its pages are in memory."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(memory.ctypes.data // PAGE * 8)
        found = np.frombuffer(entries.read(-(-memory.size // PAGE) * 8), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in found]


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="only Linux tells what is there")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("first", "end"),
    [
        (0, 7 * LARGE_PAGE),
        (3 * PAGE, 2 * LARGE_PAGE + PAGE),
        (PAGE + 1, PAGE + 2),
        (2 * PAGE - 1, 2 * PAGE + 1),
    ],
)
def test_every_page_of_a_piece_is_there_and_none_beside_it(threads: int, first: int, end: int) -> None:
    mapped = mmap.mmap(-1, 7 * LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    _kernels.Pool(threads).take_pages(memory[first:end])
    wanted = [first // PAGE <= page <= (end - 1) // PAGE for page in range(7 * LARGE_PAGE // PAGE)]
    assert present_pages(memory) == wanted


def test_what_the_pages_hold_stays() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 3 * LARGE_PAGE + 12345, np.uint8)
    before = memory.copy()
    pool = _kernels.Pool(2)
    for first, end in [(0, memory.size), (777, memory.size - 99), (5, 5), (LARGE_PAGE, LARGE_PAGE + 1)]:
        pool.take_pages(memory[first:end])
    assert np.array_equal(memory, before)
