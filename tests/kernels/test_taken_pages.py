"""Prefaulted memory: exactly the requested pages become resident, and their content stays."""

from __future__ import annotations

import numpy as np
import pytest

from resident_pages import PAGE, needs_pagemap, pages_between, present_pages, untouched

_kernels = pytest.importorskip("weft._kernels")

LARGE_PAGE = 2 << 20


@needs_pagemap
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
def test_every_page_of_the_range_is_resident_and_no_other(threads: int, first: int, end: int) -> None:
    memory = untouched(7 * LARGE_PAGE)
    _kernels.Pool(threads).take_pages(memory[first:end])
    assert present_pages(memory) == pages_between(first, end, memory.size)


def test_the_content_of_the_pages_stays() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 3 * LARGE_PAGE + 12345, np.uint8)
    before = memory.copy()
    pool = _kernels.Pool(2)
    for first, end in [(0, memory.size), (777, memory.size - 99), (5, 5), (LARGE_PAGE, LARGE_PAGE + 1)]:
        pool.take_pages(memory[first:end])
    assert np.array_equal(memory, before)
