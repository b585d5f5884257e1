"""Stop strings: finds them in a stream, across the borders of tokens, and keeps them out of the text."""

from __future__ import annotations

from collections.abc import Sequence

from weft.text.answer_parts import overlap


class StopFinder:
    """Holds back what may become a stop string. What `add` returns is certain to be part of the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str, may_stop: bool = True) -> str:
        """The text that is now certain. Sets `is_stopped` when a stop string is complete; then nothing follows.

        Without `may_stop`, one that is complete within this text is text like any other.
        """
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        held, text = len(self._held), self._held + text
        found: list[int] = []
        if may_stop:
            # Only what ends in the new text: what was held back may hold one that was not to be looked for.
            places = (text.find(stop, max(0, held - len(stop) + 1)) for stop in self._stops)
            found = [place for place in places if place >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        kept = overlap(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, once no more text can follow."""
        held, self._held = self._held, ""
        return held
