"""How fast requests end, and from that when it is worth coming back."""

from __future__ import annotations

import math

from weft.clock import Clock

_MEMORY_SECONDS = 30.0
"""What ended longer ago than this hardly counts."""
_SHORTEST, _LONGEST = 1, 600


class CompletionRate:
    """A moving rate of ends. A server that has ended nothing lately, or nothing yet, is taken for one that ends one
    request in `_MEMORY_SECONDS`: otherwise the first rush after a quiet night would be told to come back in a week."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._weight = 1.0
        self._seen = clock()

    def record_end(self) -> None:
        """A request ended."""
        self._fade()
        self._weight += 1.0

    @property
    def rate(self) -> float:
        """Ends per second, lately."""
        self._fade()
        return self._weight / _MEMORY_SECONDS

    def seconds_for(self, num_ahead: int) -> float:
        """How long until so many have ended."""
        return num_ahead / self.rate

    def _fade(self) -> None:
        now = self._clock()
        self._weight = max(1.0, self._weight * math.exp((self._seen - now) / _MEMORY_SECONDS))
        self._seen = now


def retry_after(seconds: float) -> str:
    """A Retry-After header: whole seconds, at least one, at most ten minutes."""
    return str(min(_LONGEST, max(_SHORTEST, math.ceil(seconds))))
