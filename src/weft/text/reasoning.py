"""What a model thinks before it answers: how its template marks that, and how it is split from the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.text.answer_parts import Trimmed, overlap

_LONGEST_SPACE = 64


@dataclass(frozen=True)
class ReasoningMarkers:
    opening: str
    closing: str


_KNOWN = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


def markers_in(sources: Iterable[str]) -> ReasoningMarkers | None:
    """The markers that templates know; None for a model that was not made to think.

    The closing one decides: some templates write the opening one themselves, others leave it to the model.
    """
    sources = list(sources)
    return next((one for one in _KNOWN if any(one.closing in source for source in sources)), None)


class ReasoningParser:
    """Splits an answer into thoughts, which come first if at all, and the rest."""

    def __init__(self, markers: ReasoningMarkers, *, begins_inside: bool) -> None:
        self._markers = markers
        self._may_open = True
        self._is_inside = begins_inside
        self._is_over = False
        self._held = ""
        self._thoughts = Trimmed(keeps_start=False)
        self._is_before_answer = False
        """Between the thoughts and the answer there is white space that belongs to neither."""

    @property
    def is_inside(self) -> bool:
        return self._is_inside

    def add(self, text: str) -> tuple[str, str]:
        """What was thought, and what belongs to the answer."""
        if self._is_over:
            return "", self._answer(text)
        text = self._held + text
        self._held = ""
        if self._may_open:
            stripped = text.lstrip()
            opening = self._markers.opening
            is_near = len(text) - len(stripped) <= _LONGEST_SPACE
            is_open = is_near and stripped.startswith(opening)
            if is_near and not is_open and opening.startswith(stripped):
                self._held = text
                return "", ""
            self._may_open = False
            if is_open:
                # Some models repeat the marker that their template has written already.
                self._is_inside = True
                text = stripped[len(opening) :]
            elif not self._is_inside:
                self._is_over = True
                return "", text
        return self._inside(text)

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (self._thoughts.add(held), "") if self._is_inside else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        closing = self._markers.closing
        place = text.find(closing)
        if place < 0:
            kept = overlap(text, (closing,))
            self._held = text[len(text) - kept :]
            return self._thoughts.add(text[: len(text) - kept]), ""
        self._is_over, self._is_inside, self._is_before_answer = True, False, True
        return self._thoughts.add(text[:place]), self._answer(text[place + len(closing) :])

    def _answer(self, text: str) -> str:
        if self._is_before_answer:
            text = text.lstrip()
            self._is_before_answer = not text
        return text
