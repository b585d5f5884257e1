"""Measures how many requests end per second, to predict when a refused client should retry."""

from __future__ import annotations

import math

from weft.clock import Clock

_MEMORY_SECONDS = 30.0
"""Time constant of the moving average."""
_SHORTEST, _LONGEST = 1, 600


class CompletionRate:
    """A moving average of the requests that end per second. It is never below one request per `_MEMORY_SECONDS`.
    Otherwise the average would be near 0 after an idle night, and the first refused clients would get the longest
    Retry-After."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._weight = 1.0
        self._seen = clock()

    def record_end(self) -> None:
        """Records that a request ended."""
        self._fade()
        self._weight += 1.0

    @property
    def rate(self) -> float:
        """Requests that end per second."""
        self._fade()
        return self._weight / _MEMORY_SECONDS

    def seconds_for(self, num_ahead: int) -> float:
        """Expected seconds until `num_ahead` requests have ended."""
        return num_ahead / self.rate

    def _fade(self) -> None:
        now = self._clock()
        self._weight = max(1.0, self._weight * math.exp((self._seen - now) / _MEMORY_SECONDS))
        self._seen = now


def retry_after(seconds: float) -> str:
    """The value of a Retry-After header: whole seconds, at least 1 and at most 600."""
    return str(min(_LONGEST, max(_SHORTEST, math.ceil(seconds))))
