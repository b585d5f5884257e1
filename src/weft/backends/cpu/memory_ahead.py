"""Takes memory for the cache from the system before it is needed, while nothing runs.

A page that is touched for the first time has to be found and cleared, by the thread that touches it, and the others wait for that one:
on a virtual machine the prompts of a new server took 5 to 10% longer for it. Between requests nobody waits.
"""

from __future__ import annotations

import numpy as np

_PAGE_BYTES = 4096
_BYTES_AT_ONCE = 2 << 20
"""What a request that comes meanwhile has to wait for: a large page, or as many small ones. About a millisecond."""


class MemoryAhead:
    """The memory of an array whose rows are used from the first one on. Belongs to the thread that uses them."""

    def __init__(self, rows: np.ndarray, ahead_bytes: int) -> None:
        """So many bytes behind those in use are to be there."""
        self._bytes = rows.reshape(-1).view(np.uint8)
        self._row_bytes = self._bytes.size // len(rows)
        self._ahead_bytes = ahead_bytes
        self._taken = 0
        self._wanted = 0
        self.use(0)

    @property
    def is_wanting(self) -> bool:
        return self._taken < self._wanted

    def use(self, num_rows: int) -> None:
        """The first `num_rows` are in use, or will be with the next step."""
        used = num_rows * self._row_bytes
        self._taken = max(self._taken, min(used, self._bytes.size))
        self._wanted = max(self._wanted, min(used + self._ahead_bytes, self._bytes.size))

    def take_some(self) -> None:
        """Takes a little of what is wanted. Nobody may write to the array at the same time."""
        end = min(self._taken + _BYTES_AT_ONCE, self._wanted)
        pages = self._bytes[self._taken : end : _PAGE_BYTES]
        pages |= 0  # written, and left as it was
        self._taken = end
