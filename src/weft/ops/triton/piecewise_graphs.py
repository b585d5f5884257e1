"""Stretches of a forward pass between two attentions, as graphs for the steps that are not graphs as a whole.

A step with prompts has attention for its own lengths, but what lies between depends on the number of rows alone, and
numbers of rows are padded to few. To launch it takes the host longer than small steps take the card; a graph of it
takes the host as long as one launch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from weft.ops.triton.device import Device, Graph

_log = logging.getLogger(__name__)

_MOST_ROWS = 2048
"""Of larger steps the card has more to do than the host."""
_MOST_SIZES = 16
"""So many numbers of rows have graphs; those of one take some ten megabytes of the card."""


class PiecewiseGraphs:
    """The graphs of all stretches of a program, by number of rows. The first step with a number of rows is launched,
    so that kernels are there; the second is captured."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[int, dict[int, Graph]] = {}
        self._steps: Counter[int] = Counter()
        self._pool: object = None
        self._works = True

    def serve(self, rows: int) -> bool:
        """Whether a step that begins, with so many rows, runs its stretches from graphs."""
        if rows > _MOST_ROWS or not self._works:
            return False
        self._steps[rows] += 1
        if self._steps[rows] > 1 and len(self._graphs) < _MOST_SIZES:
            self._graphs.setdefault(rows, {})
        return rows in self._graphs

    def run(self, number: int, rows: int, work: Callable[[], object]) -> None:
        """The stretch of this number, which `work` launches."""
        graph = self._graphs[rows].get(number)
        if graph is None and self._works:
            if self._pool is None:
                self._pool = self._device.graph_pool()
            try:
                graph = self._graphs[rows][number] = self._device.capture(work, self._pool)
            except Exception as error:
                # Nothing of it has run. Where the card itself has failed, the launches that follow say so.
                self._works = False
                _log.warning("a part of a step of %d rows could not be captured (%s)", rows, error)
        if graph is None:
            work()
        else:
            graph.replay()
