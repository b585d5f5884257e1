"""The clock: a function that returns seconds. Passed in everywhere, so that a run can be replayed."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]


class VirtualClock:
    """A clock that moves only when told to. Time never runs backwards."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: asked to advance by {seconds} s")
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Moves to `moment`, or stays when it has already passed."""
        self.now = max(self.now, moment)
