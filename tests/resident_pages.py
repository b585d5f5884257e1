"""Reads from Linux which pages of an array are resident in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE

needs_pagemap = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="resident pages are read from /proc/self/pagemap"
)


def untouched(size: int) -> np.ndarray:
    """Bytes in small pages, none of them resident. The first byte is at the start of a page."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def present_pages(memory: np.ndarray) -> list[bool]:
    """For each page of an array whether it is resident. The array must start at a page boundary."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(memory.ctypes.data // PAGE * 8)
        found = np.frombuffer(entries.read(-(-memory.size // PAGE) * 8), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in found]


def pages_between(first: int, end: int, size: int) -> list[bool]:
    """For each page of `size` bytes whether it contains a byte of [first, end)."""
    return [first // PAGE <= page <= (end - 1) // PAGE for page in range(size // PAGE)]
