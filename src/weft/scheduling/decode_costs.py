"""What a step of decodes costs beside its rows, learned from the steps as they run. From it follows how many draft tokens are worth their rows."""

from __future__ import annotations

RATE = 1 / 16
"""The weight of a new step in the mean step, to which each step is compared."""

MEMORY = 256.0
FIRST_MEMORY = 16.0
"""Squared rows by which steps differed from the mean: what is remembered of them, and what the first value counts for."""

MOST_OF_ONE_STEP = 0.25
LONGEST = 3.0
"""One step moves the estimate by this share at most, and counts for so many times the mean at most: the machine may have stalled."""

MOST_OFF = 16.0
"""The estimate stays within this factor of what the backend stated."""

GAP_FACTOR = 3.0
"""A step that is planned late costs more than the time between two steps: threads have to wake up, and caches have gone cold. Measured with
one to eight decodes: 2 to 6 times as much."""

LONGEST_GAP = 0.25
"""Of the mean step: what such a gap counts for at most. A caller may run the engine at its own pace."""


class DecodeCosts:
    """Learns `fixed_rows`: seconds of a step = (`fixed_rows` + rows) * seconds of a row.

    The true cost has steps, since kernels compute rows in tiles; a straight line is off by up to a seventh, which changes few choices.
    A table of every number of rows would need many times as many steps to be sure of each. Only the ratio is kept, so a machine that
    becomes slower as a whole changes nothing. Each step is compared to the mean of the last ones. So contexts that grow slowly do not count as
    rows, and steps that are all alike leave the estimate as it is.
    """

    def __init__(self, fixed_rows: float) -> None:
        self.fixed_rows = fixed_rows
        self._least, self._most = fixed_rows / MOST_OFF, fixed_rows * MOST_OFF
        self._rows = 0.0
        self._seconds = 0.0
        self._known = FIRST_MEMORY
        self._gap = 0.0

    @property
    def gap_rows(self) -> float:
        """What it costs to plan a step only after the end of the one before it, as a number of rows."""
        return GAP_FACTOR * self._gap * (self.fixed_rows + self._rows) / self._seconds if self._gap else 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """Takes in a step without prompts."""
        if seconds <= 0.0:
            return
        if not self._seconds:
            self._rows, self._seconds = rows, seconds
            return
        more_rows = rows - self._rows
        longer = min(seconds, LONGEST * self._seconds) - self._seconds
        weight = more_rows * more_rows
        if weight:
            row = self._seconds / (self.fixed_rows + self._rows)
            self._known = min(self._known + weight, MEMORY)
            row += min(weight / self._known, MOST_OF_ONE_STEP) * (longer / more_rows - row)
            # Seconds of a row at the two bounds of the ratio; a step may seem to cost less with more rows.
            cheapest, dearest = (self._seconds / (fixed + self._rows) for fixed in (self._most, self._least))
            self.fixed_rows = self._seconds / min(max(row, cheapest), dearest) - self._rows
        self._rows += RATE * more_rows
        self._seconds += RATE * longer

    def learn_gap(self, seconds: float) -> None:
        """Takes in the time from the end of one step to the start of the next, which could not be planned before."""
        seconds = min(max(seconds, 0.0), LONGEST_GAP / GAP_FACTOR * self._seconds)
        self._gap += RATE * (seconds - self._gap) if self._gap else seconds
