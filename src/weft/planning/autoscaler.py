"""Decides how many replicas there should be, by waiting tokens and first-token latency. Pure: the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import InvalidRequestError

_NEWEST = 0.05
"""The weight of the newest window. Each one before it counts for 5% less."""
_LEAST_LATE = 1.5


@dataclass(frozen=True)
class Autoscaling:
    """Limits of the number of replicas, and what changes it."""

    least: int
    most: int
    start_seconds: float = 60.0
    """Seconds from the decision until a new replica is ready. They are paid."""
    first_token: float = 1.0
    """A first token that took longer than this is late. Late ones add replicas, if there are enough of them."""
    late_share: float = 0.05
    """This fraction of the first tokens of the last seconds may be late. One alone never adds a replica: a long prompt is
    late with any number of them."""
    waiting_seconds: float = 0.5
    """So does a queue that the ready replicas need longer for than this, on average."""
    idle_seconds: float = 120.0
    """A replica is drained after the load was low for this long."""
    low_load: float = 0.6
    """The load is low if the other replicas would be busy for less than this fraction of the time."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidRequestError(
                f"the replicas go from {self.least} to {self.most}; write at least 1, and the larger number last"
            )
        if not 0 <= self.start_seconds < 1e6:
            raise InvalidRequestError(f"the start takes {self.start_seconds} s; allowed: 0 or more")


class FleetLoad(NamedTuple):
    """The load of all ready replicas in the last window."""

    ready: int
    starting: int
    waiting_seconds: float
    """Predicted seconds that the ready replicas need for all waiting prompt tokens, on average."""
    first_tokens: int
    """First tokens in the window."""
    late: int
    """Those of them that were late."""
    busy: float
    """The fraction of the time in which steps ran, on average over the replicas."""


class Autoscaler:
    """Owns the times of the last changes."""

    def __init__(self, settings: Autoscaling) -> None:
        self.settings = settings
        self._low_since: float | None = None
        self._busy = 1.0
        """A mean over the last windows, of which the newest count most."""
        self._first_tokens = self._late = 0.0
        """Sums over the last windows, likewise."""

    def wanted(self, now: float, load: FleetLoad) -> int:
        """The number of replicas that should be ready or starting. It grows by what the queue needs, and falls by one."""
        settings, current = self.settings, load.ready + load.starting
        self._busy += _NEWEST * (load.busy - self._busy)
        self._first_tokens += load.first_tokens - _NEWEST * self._first_tokens
        self._late += load.late - _NEWEST * self._late
        is_late = bool(load.late) and self._late >= _LEAST_LATE
        is_late = is_late and self._late > settings.late_share * self._first_tokens
        if load.waiting_seconds > settings.waiting_seconds or is_late:
            self._low_since = None
            # While a replica starts, its effect is not known yet: only a queue that needs still more adds others.
            needed = load.ready * max(1.0, load.waiting_seconds / settings.waiting_seconds)
            more = max(load.ready + 1, min(round(needed), 2 * load.ready))
            return min(settings.most, max(current, more))
        others = load.ready - 1
        is_low = others >= settings.least and self._busy * load.ready < settings.low_load * others
        if not is_low or load.starting:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= settings.idle_seconds:
            self._low_since = now
            return current - 1
        return max(settings.least, min(settings.most, current))

    def rest(self, windows: int) -> None:
        """Passes windows without requests, when the fewest replicas are ready and none starts: nothing is decided."""
        self._low_since = None
        left = (1 - _NEWEST) ** windows
        self._busy, self._first_tokens, self._late = (
            left * one for one in (self._busy, self._first_tokens, self._late)
        )
