"""The clock: a function that returns seconds. It is always passed in, so that a run can be replayed."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]


class VirtualClock:
    """A clock that only its owner advances. It never goes back."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: seconds is {seconds}; allowed: at least 0")
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Advances the clock to `moment`, unless the clock is past it."""
        self.now = max(self.now, moment)
