"""Takes memory for the cache from the system before it is needed: while nothing runs, beside a step, or before one.

A page that is touched for the first time has to be found and cleared, by the thread that touches it: 4 to 5 ms for a large page
where a host has to find it too. Between requests nobody waits for that. Under load one thread takes what the next steps are likely
to need while the others compute; what is still missing is taken before the step that needs it, each thread a part.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_PAGE_BYTES = 4096
_LARGE_PAGE_BYTES = 2 << 20
_MOST_PAGES_IN_STEP = 8
_MOST_PAGES_BESIDE = 8


class Taker(Protocol):
    """Takes memory, with several threads if there are so many large pages: `_kernels.Pool`."""

    @property
    def threads(self) -> int: ...
    def take_pages(self, bytes: np.ndarray) -> None: ...
    def offer_pages(self, bytes: np.ndarray) -> None: ...
    def withdraw_pages(self) -> bool: ...


class OneThread:
    """The same where there is no pool of threads."""

    threads = 1

    def take_pages(self, bytes: np.ndarray) -> None:
        pages = bytes[::_PAGE_BYTES]
        pages |= 0  # written, and left as it was

    def offer_pages(self, bytes: np.ndarray) -> None:
        """Nobody has time for them."""

    def withdraw_pages(self) -> bool:
        return True


class MemoryAhead:
    """The memory of an array whose rows are used from the first one on. Belongs to the thread that uses them."""

    def __init__(self, rows: np.ndarray, ahead_bytes: int, taker: Taker | None = None) -> None:
        """So many bytes behind those in use are to be there. Nobody may write to what is being taken."""
        self._bytes = rows.reshape(-1).view(np.uint8)
        self._address = self._bytes.ctypes.data
        self._row_bytes = self._bytes.size // len(rows)
        self._ahead_bytes = ahead_bytes
        self._taker: Taker = OneThread() if taker is None else taker
        self._bytes_in_step = min(self._taker.threads, _MOST_PAGES_IN_STEP) * _LARGE_PAGE_BYTES
        self._used = 0
        self._taken = 0
        self._offered = 0

    @property
    def is_wanting(self) -> bool:
        return self._taken < min(self._used + self._ahead_bytes, self._bytes.size)

    def use(self, num_rows: int) -> None:
        """The first `num_rows` are in use, or will be with the step that comes now: takes those that are not there, and offers
        what the two steps behind it will lack if each needs as many again, up to a bound."""
        used = max(num_rows * self._row_bytes, self._used)
        if (
            used > self._taken
        ):  # at least a page for each thread: together they take less than twice as long as one for one
            self._take_until(max(used, self._taken + self._bytes_in_step))
        most = min(self._taken + _MOST_PAGES_BESIDE * _LARGE_PAGE_BYTES, self._bytes.size)
        next_used = min(used + 2 * (used - self._used), most)
        if next_used > self._taken:
            end = self._page_end(next_used)
            self._taker.offer_pages(self._bytes[self._taken : end])
            self._offered = end
        self._used = used

    def end_step(self) -> None:
        """The step is over: what was offered is there, or is offered no more."""
        offered, self._offered = self._offered, 0
        if offered and not self._taker.withdraw_pages():
            self._taken = offered

    def take_some(self) -> None:
        """Takes a little of what is wanted: a large page, for which a request that comes meanwhile has to wait."""
        self._take_until(self._taken + 1)

    def _take_until(self, end: int) -> None:
        end = self._page_end(end)
        self._taker.take_pages(self._bytes[self._taken : end])
        self._taken = end

    def _page_end(self, end: int) -> int:
        """Where the large page ends that ends so far behind the first row, or later: there the next piece begins."""
        return min(end + -(self._address + end) % _LARGE_PAGE_BYTES, self._bytes.size)
