"""Which pages of an array are in memory, as Linux tells."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE

needs_pagemap = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="only Linux tells what is there"
)


def untouched(size: int) -> np.ndarray:
    """Bytes in small pages of which none is there yet; they begin at a page."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def present_pages(memory: np.ndarray) -> list[bool]:
    """Of an array that begins at a page."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(memory.ctypes.data // PAGE * 8)
        found = np.frombuffer(entries.read(-(-memory.size // PAGE) * 8), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in found]


def pages_between(first: int, end: int, size: int) -> list[bool]:
    """Which pages of so many bytes hold one from `first` up to `end`."""
    return [first // PAGE <= page <= (end - 1) // PAGE for page in range(size // PAGE)]
