"""Prefaults KV cache memory before a step needs it: while idle, in parallel with a step, or right before one.

At the first write to a page, the operating system finds and clears memory, in the thread that writes: 4 to 5 ms for a
large page in a virtual machine. While the engine is idle, this delays no request. Under load, one thread of the pool
prefaults what the next steps will probably need, while the other threads compute. A step that still lacks pages
prefaults them first, with all threads.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_PAGE_BYTES = 4096
_LARGE_PAGE_BYTES = 2 << 20
_MOST_PAGES_BEFORE_STEP = 8
_MOST_PAGES_DURING_STEP = 8


class PageFaulter(Protocol):
    """Prefaults pages; `_kernels.Pool` does it with its threads."""

    @property
    def threads(self) -> int: ...
    def take_pages(self, bytes: np.ndarray) -> None: ...
    def offer_pages(self, bytes: np.ndarray) -> None: ...
    def withdraw_pages(self) -> bool: ...


class OneThread:
    """A `PageFaulter` without a thread pool."""

    threads = 1

    def take_pages(self, bytes: np.ndarray) -> None:
        pages = bytes[::_PAGE_BYTES]
        pages |= 0  # a write that keeps the content

    def offer_pages(self, bytes: np.ndarray) -> None:
        """Without a pool there is no other thread that could prefault them."""

    def withdraw_pages(self) -> bool:
        return True


class Prefaulter:
    """Prefaults an array whose rows are used in ascending order. Only the thread that uses the rows may call it.

    0 ........ _used ........ _prefaulted ........ _offered        bytes from the start of the array
    """

    def __init__(self, rows: np.ndarray, ahead_bytes: int, faulter: PageFaulter | None = None) -> None:
        """`ahead_bytes`: bytes to keep prefaulted after the used rows. Nothing else may write to a page while it is being
        prefaulted."""
        self._bytes = rows.reshape(-1).view(np.uint8)
        self._address = self._bytes.ctypes.data
        self._row_bytes = self._bytes.size // len(rows)
        self._ahead_bytes = ahead_bytes
        self._faulter: PageFaulter = OneThread() if faulter is None else faulter
        self._bytes_before_step = min(self._faulter.threads, _MOST_PAGES_BEFORE_STEP) * _LARGE_PAGE_BYTES
        self._used = 0
        self._prefaulted = 0
        self._offered = 0

    @property
    def needs_more(self) -> bool:
        return self._prefaulted < min(self._used + self._ahead_bytes, self._bytes.size)

    def use(self, num_rows: int) -> None:
        """Called before a step that uses the first `num_rows` rows. Prefaults the rows that are not prefaulted yet.

        Also offers the pool the pages for the next two steps, assuming that each needs as many new rows as this one.
        """
        used = max(num_rows * self._row_bytes, self._used)
        if used > self._prefaulted:
            # Prefaults at least one large page per thread, up to 8. In parallel they take less than twice the time of one.
            self._prefault_until(max(used, self._prefaulted + self._bytes_before_step))
        most = min(self._prefaulted + _MOST_PAGES_DURING_STEP * _LARGE_PAGE_BYTES, self._bytes.size)
        next_used = min(used + 2 * (used - self._used), most)
        if next_used > self._prefaulted:
            end = self._page_end(next_used)
            self._faulter.offer_pages(self._bytes[self._prefaulted : end])
            self._offered = end
        self._used = used

    def end_step(self) -> None:
        """Withdraws the offered pages, unless a thread has prefaulted them during the step."""
        offered, self._offered = self._offered, 0
        if offered and not self._faulter.withdraw_pages():
            self._prefaulted = offered

    def prefault_some(self) -> None:
        """Prefaults only one large page, because a request that arrives during this time has to wait."""
        self._prefault_until(self._prefaulted + 1)

    def _prefault_until(self, end: int) -> None:
        end = self._page_end(end)
        self._faulter.take_pages(self._bytes[self._prefaulted : end])
        self._prefaulted = end

    def _page_end(self, end: int) -> int:
        """Rounds `end` up to the end of a large page. The next range begins there."""
        return min(end + -(self._address + end) % _LARGE_PAGE_BYTES, self._bytes.size)
