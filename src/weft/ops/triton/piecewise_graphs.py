"""CUDA graphs of the segments between two attentions, for steps that are not captured as a whole.

In a step with prompts, the launches of attention depend on the lengths of its requests. The segments between
attentions depend only on the number of rows, which is padded to few sizes. In small steps the host needs longer to
launch a segment than the GPU needs to run it. Launching a graph takes as long as one launch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from weft.ops.triton.device import Device, Graph

_log = logging.getLogger(__name__)

_MOST_ROWS = 2048
"""Steps with more rows use no graphs: there the GPU takes longer than the host."""
_MOST_SIZES = 16
"""At most this many row counts have graphs. The graphs of one row count take about ten megabytes of GPU memory."""


class PiecewiseGraphs:
    """The graphs of all segments of a program, by number of rows. The first step with a row count runs without graphs,
    so that its kernels are compiled; the second step is captured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[int, dict[int, Graph]] = {}
        self._steps: Counter[int] = Counter()
        self._pool: object = None
        self._works = True

    def begin_step(self, rows: int) -> bool:
        """Counts the step that begins. Returns True if its segments run from graphs."""
        if rows > _MOST_ROWS or not self._works:
            return False
        self._steps[rows] += 1
        if self._steps[rows] > 1 and len(self._graphs) < _MOST_SIZES:
            self._graphs.setdefault(rows, {})
        return rows in self._graphs

    def run(self, number: int, rows: int, work: Callable[[], object]) -> None:
        """Runs segment `number` from its graph; `work` launches it without a graph."""
        graph = self._graphs[rows].get(number)
        if graph is None and self._works:
            if self._pool is None:
                self._pool = self._device.graph_pool()
            try:
                graph = self._graphs[rows][number] = self._device.capture(work, self._pool)
            except Exception as error:
                # A failed capture has run nothing, so the work is launched instead. If the GPU itself failed, these
                # launches raise the error.
                self._works = False
                _log.warning("a graph segment of a step with %d rows could not be captured (%s)", rows, error)
        if graph is None:
            work()
        else:
            graph.replay()
