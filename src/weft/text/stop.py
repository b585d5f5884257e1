"""Stop strings: finds them in a stream, across the borders of tokens, and keeps them out of the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopFinder:
    """Holds back what may become a stop string. What `add` returns is certain to be part of the text.

    Each character is looked at once for each stop string (Knuth, Morris, Pratt): a text that nearly holds many long ones
    takes no longer than any other.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._matched = [0] * len(self._stops)
        """How many characters of each stop string the text ends with."""
        self._held = ""
        self.is_stopped = False

    def add(self, text: str, may_stop: bool = True) -> str:
        """The text that is now certain. Sets `is_stopped` when a stop string is complete; then nothing follows.

        Without `may_stop`, one that is complete within this text is text like any other.
        """
        if self.is_stopped:
            return ""
        ends = [self._read(index, text, may_stop) for index in range(len(self._stops))]
        before, whole = len(self._held), self._held + text
        places = [before + end - len(stop) for stop, end in zip(self._stops, ends, strict=True) if end]
        if places:
            self.is_stopped, self._held = True, ""
            return whole[: min(places)]
        certain = len(whole) - max(self._matched, default=0)
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """What was held back, once no more text can follow."""
        held, self._held = self._held, ""
        return held

    def _read(self, index: int, text: str, may_stop: bool) -> int:
        """The place in `text` behind which a stop string is first complete; 0: it is not."""
        stop, matched, place = self._stops[index], self._matched[index], 0
        while place < len(text):
            if matched and stop[matched] != text[place]:
                matched = _borders(stop)[matched]
                continue
            if not matched:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            matched += 1
            place += 1
            if matched == len(stop):
                if may_stop:
                    return place
                matched = _borders(stop)[matched]
        self._matched[index] = matched
        return 0


@lru_cache(maxsize=256)
def _borders(stop: str) -> list[int]:
    """For each length of a beginning of `stop`: the length of the longest shorter beginning that it ends with. The answers
    to one request share it."""
    borders, matched = [0, 0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched]
        matched += stop[matched] == character
        borders.append(matched)
    return borders
