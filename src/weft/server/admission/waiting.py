"""Predicts when a refused client should retry: when a place for it will be free."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from weft.clock import Clock
from weft.lengths import LengthDistribution

_SHORTEST, _LONGEST = 1, 600
_MAX_PROMISES = 4096
_LATE_SECONDS = 10.0
"""A refused client is expected back after the wait that it was given. This long after that, it is not expected any more."""
_MAX_CLIENTS_PER_PLACE = 4
"""A client that retries too early is refused several times, and each refusal counts as a client. So at most this many
clients for each place count as waiting."""
_CACHED_SECONDS = 0.25
_MORE_ENDS = 32
"""This many more ends than needed are computed. The next refusals use them."""
_SAMPLES = 2000
"""Lengths that one prediction draws. With few places, the prediction is the median of several draws."""
_MAX_DRAWS = 25
_GOLDEN = 0.6180339887498949
"""Multiples of this number, modulo 1, are evenly spread. So no random numbers are needed to draw from a distribution."""
_FADING = 0.98
"""The sums over earlier answers are multiplied by this whenever an answer ends."""


class Place(NamedTuple):
    """A request that takes a place until its last answer has ended."""

    distribution: LengthDistribution
    num_tokens: int
    """Tokens of each of its answers so far. 0: the request waits, or is in prefill."""
    num_answers: int = 1


class WaitEstimate:
    """Owns the pace of recent answers, and the times at which refused clients are expected back. A client that comes back
    cannot be distinguished from a new one. So an accepted request counts as the expected client with the oldest time. A
    client that is refused after that time counts as the same client."""

    def __init__(self, clock: Clock, *, is_shortest_first: bool) -> None:
        """`is_shortest_first`: waiting requests with short answers mostly run before those with long ones."""
        self._clock = clock
        self._is_shortest_first = is_shortest_first
        self._decode_seconds, self._decode_steps = 0.05, 1.0
        self._prefill_seconds, self._answers = 0.1, 1.0
        self._promises: dict[str, deque[float]] = {}
        """Scope ("" or the name of a key) -> the times at which refused clients are expected back, in order."""
        self._ends: dict[str, tuple[float, list[list[float]]]] = {}
        """Scope -> the time of the computation, and for each draw the seconds until places become free, sorted."""

    def record(self, prefill_seconds: float, decode_seconds: float, decode_steps: int) -> None:
        """Adds the times of an answer that has ended."""
        self._decode_seconds = _FADING * self._decode_seconds + decode_seconds
        self._decode_steps = _FADING * self._decode_steps + decode_steps
        self._prefill_seconds = _FADING * self._prefill_seconds + prefill_seconds
        self._answers = _FADING * self._answers + 1

    def accepted(self, scope: str) -> None:
        """Call when a request has taken a place."""
        if promises := self._promises.get(scope):
            promises.popleft()

    def seconds_until_free(
        self,
        scope: str,
        num_places: int,
        find_places: Callable[[], tuple[list[Place], LengthDistribution]],
        needed: int = 1,
        *,
        is_promise: bool = True,
    ) -> float:
        """Seconds until `needed` more places of a scope are free, for a client that is refused now.
        `find_places` returns all places that are taken, and the expected lengths of answers to new requests. It is called
        a few times a second at most. `is_promise`: the client will come back."""
        now = self._clock()
        promises = self._promises.setdefault(scope, deque())
        while promises and promises[0] <= now - _LATE_SECONDS:
            promises.popleft()
        if is_promise and promises and promises[0] <= now:
            promises.popleft()  # the expected client has come back, and is refused again
        most = _MAX_CLIENTS_PER_PLACE * max(1, num_places)
        index = min(needed + len(promises), most) - 1
        at, draws = self._ends.get(scope, (-math.inf, [[]]))
        if now - at > _CACHED_SECONDS or index >= len(draws[0]):
            at, draws = now, self._draw_ends(*find_places(), min(index + 1 + _MORE_ENDS, most))
            self._ends[scope] = (at, draws)
        seconds = at + median(draw[index] for draw in draws) - now
        seconds = min(max(seconds, 0.0), float(_LONGEST))
        if is_promise and len(promises) < _MAX_PROMISES:
            promises.append(max(now + seconds, promises[-1] if promises else 0.0))
        return seconds

    def _draw_ends(self, places: list[Place], newcomer: LengthDistribution, count: int) -> list[list[float]]:
        """For several draws of the lengths: the seconds until each of the next `count` places becomes free. A free place is
        taken again at once."""
        if not places:
            return [[0.0] * count]
        pace = self._decode_seconds / max(1.0, self._decode_steps)
        start = self._prefill_seconds / self._answers
        running = [place for place in places if place.num_tokens]
        waiting = [place for place in places if not place.num_tokens]
        # Some requests without a token are in prefill. Their number is estimated from the ratio of prefill to decode times.
        num_in_prefill = round(len(running) * self._prefill_seconds / max(self._decode_seconds, 1e-9))
        num_in_prefill = num_in_prefill if running else len(waiting)
        running, waiting = running + waiting[:num_in_prefill], waiting[num_in_prefill:]
        num_each = len(running) + count
        num_draws = max(1, min(_MAX_DRAWS, _SAMPLES // num_each))

        def mean_of(place: Place) -> float:
            # With equal values, the queue below is in order of arrival.
            return place.distribution.mean if self._is_shortest_first else 0.0

        first = sorted((mean_of(place), order, place) for order, place in enumerate(waiting))
        newest, draws = Place(newcomer, 0), []
        mean_of_newest = mean_of(newest)
        for draw in range(num_draws):
            number = draw * num_each

            def length(place: Place) -> int:
                nonlocal number
                number += 1
                # The place is free when the longest of its answers ends: this is the quantile of the longest one.
                share = ((number * _GOLDEN) % 1.0) ** (1 / place.num_answers)
                return place.distribution.quantile(share, place.num_tokens) - place.num_tokens

            rows = [pace * length(place) + (0.0 if place.num_tokens else start) for place in running]
            heapq.heapify(rows)
            queue, freed = first.copy(), []
            for order in range(count):
                freed.append(rows[0])
                heapq.heappush(queue, (mean_of_newest, len(waiting) + order, newest))
                heapq.heapreplace(rows, rows[0] + start + pace * length(heapq.heappop(queue)[2]))
            draws.append(freed)
        return draws


def retry_after(seconds: float) -> str:
    """The value of a Retry-After header: whole seconds, at least 1 and at most 600."""
    return str(min(_LONGEST, max(_SHORTEST, math.ceil(seconds))))
