"""Finds stop strings in a stream, also across tokens, and cuts the text before them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopFinder:
    """Holds back text that may be the start of a stop string.

    Uses Knuth-Morris-Pratt: the cost per character does not grow with the length of a partial match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._matched = [0] * len(self._stops)
        """For each stop string: the length of its prefix that the text ends with."""
        self._held = ""
        self.is_stopped = False
        self.found: str | None = None
        """The stop string that was found first."""

    def add(self, text: str, may_stop: bool = True) -> str:
        """Returns the text that is certainly not part of a stop string.

        Sets `is_stopped` when a stop string is complete; later calls return "". With `may_stop` false, a stop string
        that is completed by this text is ordinary text.
        """
        if self.is_stopped:
            return ""
        ends = [self._find_end(index, text, may_stop) for index in range(len(self._stops))]
        before, whole = len(self._held), self._held + text
        found = [(before + end - len(stop), stop) for stop, end in zip(self._stops, ends, strict=True) if end]
        if found:
            start, self.found = min(found, key=lambda one: one[0])
            self.is_stopped, self._held = True, ""
            return whole[:start]
        certain = len(whole) - max(self._matched, default=0)
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """Ends the text and returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _find_end(self, index: int, text: str, may_stop: bool) -> int:
        """The end in `text` of the first complete match of a stop string; 0: no match."""
        stop, matched, position = self._stops[index], self._matched[index], 0
        while position < len(text):
            if matched and stop[matched] != text[position]:
                matched = _failure_table(stop)[matched]
                continue
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            matched += 1
            position += 1
            if matched == len(stop):
                if may_stop:
                    return position
                matched = _failure_table(stop)[matched]
        self._matched[index] = matched
        return 0


@lru_cache(maxsize=256)
def _failure_table(stop: str) -> list[int]:
    """The failure function of Knuth-Morris-Pratt.

    Entry n: the length of the longest proper prefix of `stop[:n]` that is also its suffix. Cached, since all answers
    of a request use it.
    """
    table, matched = [0, 0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = table[matched]
        matched += stop[matched] == character
        table.append(matched)
    return table
