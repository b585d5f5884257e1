"""Owns the deadlines of requests, and finds those that have passed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from weft.scheduling.sequence import Sequence


class Deadlines:
    """A heap by deadline. A sequence that ended, or whose deadline was dropped, stays in it until its deadline, or until
    the heap is rebuilt."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline_at is not None:
            heapq.heappush(self._heap, (sequence.deadline_at, sequence.order, sequence))

    def take_expired(self, now: float) -> Iterator[Sequence]:
        """Removes and yields the sequences whose deadline has passed. Some of them may have ended already."""
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.deadline_at is not None:
                yield sequence

    def compact(self, num_active: int) -> None:
        """Drops the sequences that ended, once they are the large majority."""
        if len(self._heap) > 64 and len(self._heap) > 4 * num_active:
            self._heap = [item for item in self._heap if item[2].finish_reason is None]
            heapq.heapify(self._heap)
