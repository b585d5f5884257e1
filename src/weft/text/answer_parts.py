"""The parts of an answer: what is said, what was thought, which tools are called; and how they are told while they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON that the call `index` has as its arguments."""

    index: int
    text: str


Delta = Content | Thought | CallBegins | CallArguments


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    """JSON, as the model wrote it; not all of it where the answer was cut."""


@dataclass
class AnswerParts:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> AnswerParts:
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[Call] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, Thought):
            reasoning.append(delta.text)
        elif isinstance(delta, CallBegins):
            calls.append(Call(delta.id, delta.name))
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return AnswerParts("".join(content), "".join(reasoning), calls)


_LONGEST_SPACE = 64


class Trimmed:
    """Text that comes in pieces, without the white space at its ends. Of white space at most 64 characters are held
    back, so that an answer of nothing else costs no more than any other."""

    def __init__(self, *, keeps_start: bool = True) -> None:
        self._is_started = keeps_start
        self._is_empty = True
        self._held = ""

    def add(self, text: str) -> str:
        """What is certain to be inside."""
        if not self._is_started:
            text = text.lstrip()
            if not text:
                return ""
            self._is_started = True
        body = text.rstrip()
        if body:
            given, self._held = self._held + body, text[len(body) :]
        else:
            given, self._held = "", self._held + text
        if len(self._held) > _LONGEST_SPACE:
            given += self._held[:-_LONGEST_SPACE]
            self._held = self._held[-_LONGEST_SPACE:]
        self._is_empty = self._is_empty and not given
        return given

    def rest(self) -> str:
        """What was held back, where it is no end after all."""
        held, self._held = self._held, ""
        return held

    def interrupt(self) -> None:
        """Something else comes: what was held back is kept between the text before and the text after, if any."""
        self._is_started = False
        if self._is_empty:
            self._held = ""


def overlap(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest
