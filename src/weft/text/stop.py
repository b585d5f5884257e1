"""Stop strings: finds them in a stream, across the borders of tokens, and keeps them out of the text."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Holds back what may become a stop string. What `add` returns is certain to be part of the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """The text that is now certain. Sets `is_stopped` when a stop string is complete; then nothing follows."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, once no more text can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
