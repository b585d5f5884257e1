"""Reasoning: detects the markers of a model's template, and splits the reasoning from the rest of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.text.answer_parts import StreamTrimmer, partial_marker_length

_LONGEST_SPACE = 64


@dataclass(frozen=True)
class ReasoningMarkers:
    opening: str
    closing: str


_KNOWN = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


def detect_markers(sources: Iterable[str]) -> ReasoningMarkers | None:
    """The reasoning markers in a model's templates; None if there are none.

    The closing marker decides, since some templates do not contain the opening one: the model writes it.
    """
    sources = list(sources)
    return next((one for one in _KNOWN if any(one.closing in source for source in sources)), None)


class ReasoningParser:
    """Splits an answer into the reasoning, which comes first, and the rest. The reasoning may be missing."""

    def __init__(self, markers: ReasoningMarkers, *, starts_in_reasoning: bool) -> None:
        self._markers = markers
        self._may_open = True
        self._is_inside = starts_in_reasoning
        self._is_over = False
        self._held = ""
        self._trimmer = StreamTrimmer(keeps_leading=False)
        self._skips_space = False
        """Whether the next text follows the closing marker: its leading white space is dropped."""

    @property
    def is_inside(self) -> bool:
        return self._is_inside

    def add(self, text: str) -> tuple[str, str]:
        """Returns the new reasoning, and the new text after the reasoning."""
        if self._is_over:
            return "", self._after_reasoning(text)
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
                # The reasoning begins here. If the prompt ends with the marker, the reasoning began there. Some models then
                # repeat the marker, which is removed.
                self._is_inside = True
                text = stripped[len(opening) :]
            elif not self._is_inside:
                self._is_over = True
                return "", text
        return self._inside(text)

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (self._trimmer.add(held), "") if self._is_inside else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        """`add` for text inside the reasoning. Holds back the end of the text if the closing marker may begin there."""
        closing = self._markers.closing
        end = text.find(closing)
        if end < 0:
            held = partial_marker_length(text, (closing,))
            self._held = text[len(text) - held :]
            return self._trimmer.add(text[: len(text) - held]), ""
        self._is_over, self._is_inside, self._skips_space = True, False, True
        return self._trimmer.add(text[:end]), self._after_reasoning(text[end + len(closing) :])

    def _after_reasoning(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text
