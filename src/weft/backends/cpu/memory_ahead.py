"""Takes memory for the cache from the system before it is needed: while nothing runs, or by all threads at once before a step.

A page that is touched for the first time has to be found and cleared, by the thread that touches it, and the others wait for that one:
4 to 5 ms for a large page where a host has to find it too. Between requests nobody waits; what they did not leave time for
is taken before the step that needs it, each thread a part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_PAGE_BYTES = 4096
_LARGE_PAGE_BYTES = 2 << 20
_MOST_PAGES_IN_STEP = 8


def touch(memory: np.ndarray) -> None:
    """Takes it in one thread, where there is no pool of them."""
    pages = memory[::_PAGE_BYTES]
    pages |= 0  # written, and left as it was


class MemoryAhead:
    """The memory of an array whose rows are used from the first one on. Belongs to the thread that uses them."""

    def __init__(
        self,
        rows: np.ndarray,
        ahead_bytes: int,
        take: Callable[[np.ndarray], None] = touch,
        threads: int = 1,
    ) -> None:
        """So many bytes behind those in use are to be there. `take` takes a piece, with so many threads if it has as many
        large pages. Nobody may write to the array at the same time."""
        self._bytes = rows.reshape(-1).view(np.uint8)
        self._address = self._bytes.ctypes.data
        self._row_bytes = self._bytes.size // len(rows)
        self._ahead_bytes = ahead_bytes
        self._take = take
        self._bytes_in_step = min(threads, _MOST_PAGES_IN_STEP) * _LARGE_PAGE_BYTES
        self._taken = 0
        self._wanted = min(ahead_bytes, self._bytes.size)

    @property
    def is_wanting(self) -> bool:
        return self._taken < self._wanted

    def use(self, num_rows: int) -> None:
        """The first `num_rows` are in use, or will be with the next step: takes those that are not there."""
        used = num_rows * self._row_bytes
        if used > self._taken:  # at least a page for each thread, which takes no longer than one
            self._take_until(max(used, self._taken + self._bytes_in_step))
        self._wanted = max(self._wanted, min(used + self._ahead_bytes, self._bytes.size))

    def take_some(self) -> None:
        """Takes a little of what is wanted: a large page, for which a request that comes meanwhile has to wait."""
        self._take_until(self._taken + 1)

    def _take_until(self, end: int) -> None:
        """Up to the end of a large page: there the next piece begins."""
        end = min(end + -(self._address + end) % _LARGE_PAGE_BYTES, self._bytes.size)
        self._take(self._bytes[self._taken : end])
        self._taken = end
