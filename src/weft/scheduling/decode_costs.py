"""Learns the fixed cost of a decode step, expressed as a number of rows. Speculation compares the cost of draft tokens
with it."""

from __future__ import annotations

from typing import Any

from weft.learned_costs import LearnedCosts

MEAN_WEIGHT = 1 / 16
"""Weight of a new step in the running mean. Each step is compared with that mean."""

INITIAL_EVIDENCE = 16.0
EVIDENCE_STEPS = 32
"""Evidence for the estimate: the sum, over about the last EVIDENCE_STEPS steps whose rows differ from the mean, of the
squared difference. It is at least INITIAL_EVIDENCE. The more evidence there is, the less a new step changes the estimate.
The limit is a number of steps, since rows differ by ten among 8 streams with draft tokens, and by one or two without."""

MAX_CORRECTION = 0.25
MAX_STEP_RATIO = 3.0
"""Limits of the influence of one step: its weight in the estimate, and its duration relative to the mean. The machine
may have stalled during the step."""

MAX_DEVIATION = 16.0
"""The estimate stays within this factor of the value that the backend states."""

GAP_FACTOR = 3.0
"""The extra time of a step that is planned only after the previous one has ended, divided by the gap between the two
steps. It is above 1, because threads must wake up and caches are cold. Measured with one to eight decodes: 2 to 6."""

MAX_GAP_COST = 0.25
"""The largest cost of a gap, as a fraction of the mean step. A longer gap may come from a caller that runs the engine
at its own pace."""


class DecodeCosts:
    """Learns `fixed_rows` in: seconds of a step = (`fixed_rows` + rows) * seconds per row.

    The true cost is a staircase, since kernels compute rows in tiles. A straight line is off by up to 1/7, which
    changes few decisions. A table by number of rows would need many times as many steps.

    `fixed_rows` is a ratio of two times, so it does not change if the whole machine becomes slower. Each step is
    compared with the mean of recent steps. So slowly growing contexts do not look like more rows, and equal steps leave
    the estimate unchanged.
    """

    def __init__(self, fixed_rows: float) -> None:
        self._stated_rows = self.fixed_rows = fixed_rows
        self._min_fixed, self._max_fixed = fixed_rows / MAX_DEVIATION, fixed_rows * MAX_DEVIATION
        self._mean_rows = 0.0
        self._mean_seconds = 0.0
        self._evidence = INITIAL_EVIDENCE
        self._mean_gap = 0.0

    def restore(self, costs: LearnedCosts) -> None:
        """Replaces the estimates by those of an earlier run. The evidence starts anew, since the machine may have
        changed."""
        known = costs.fixed_rows if costs.mean_seconds else self._stated_rows
        self.fixed_rows = min(max(known, self._min_fixed), self._max_fixed)
        self._mean_rows, self._mean_seconds = costs.mean_rows, costs.mean_seconds
        self._mean_gap, self._evidence = costs.mean_gap, INITIAL_EVIDENCE

    @property
    def means(self) -> dict[str, Any]:
        """The learned values, as fields of `LearnedCosts`."""
        return {
            "fixed_rows": self.fixed_rows,
            "mean_rows": self._mean_rows,
            "mean_seconds": self._mean_seconds,
            "mean_gap": self._mean_gap,
        }

    @property
    def row_seconds(self) -> float:
        """Seconds of one more row. 0: not known yet."""
        return self._mean_seconds / (self.fixed_rows + self._mean_rows) if self._mean_seconds else 0.0

    @property
    def gap_rows(self) -> float:
        """The cost, in rows, of planning a step only after the previous one has ended."""
        return GAP_FACTOR * self._mean_gap / self.row_seconds if self._mean_gap else 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """Updates the estimate with one step that had no prompts."""
        if seconds <= 0.0:
            return
        if not self._mean_seconds:
            self._mean_rows, self._mean_seconds = rows, seconds
            return
        more_rows = rows - self._mean_rows
        more_seconds = min(seconds, MAX_STEP_RATIO * self._mean_seconds) - self._mean_seconds
        weight = more_rows * more_rows
        if weight:
            per_row = self._mean_seconds / (self.fixed_rows + self._mean_rows)
            self._evidence = max(self._evidence * (1 - 1 / EVIDENCE_STEPS) + weight, INITIAL_EVIDENCE)
            per_row += min(weight / self._evidence, MAX_CORRECTION) * (more_seconds / more_rows - per_row)
            # Limits `per_row`. Noise can make it negative: a step with more rows may have been faster.
            lowest, highest = (
                self._mean_seconds / (fixed + self._mean_rows) for fixed in (self._max_fixed, self._min_fixed)
            )
            self.fixed_rows = self._mean_seconds / min(max(per_row, lowest), highest) - self._mean_rows
        self._mean_rows += MEAN_WEIGHT * more_rows
        self._mean_seconds += MEAN_WEIGHT * more_seconds

    def learn_gap(self, seconds: float) -> None:
        """Updates the mean gap: the seconds from the end of a step to the start of the next. Called only if the next
        step was not planned ahead."""
        seconds = min(max(seconds, 0.0), MAX_GAP_COST / GAP_FACTOR * self._mean_seconds)
        self._mean_gap += MEAN_WEIGHT * (seconds - self._mean_gap) if self._mean_gap else seconds
