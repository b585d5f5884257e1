"""The parts of an answer (content, reasoning and tool calls), and the deltas in which a stream reports them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Some new text of the arguments (JSON) of the tool call `index`."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass
class ParsedCall:
    id: str
    name: str
    arguments: str = ""
    """JSON as the model wrote it. Incomplete if the answer ended early."""


@dataclass
class AnswerParts:
    """All parts of one answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def join_deltas(deltas: Iterable[Delta]) -> AnswerParts:
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[ParsedCall] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, Reasoning):
            reasoning.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            calls.append(ParsedCall(delta.id, delta.name))
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return AnswerParts("".join(content), "".join(reasoning), calls)


_LONGEST_SPACE = 64


class StreamTrimmer:
    """Removes trailing white space from streamed text, and leading white space unless `keeps_leading`.

    At most 64 characters of white space are held back, so that an answer of white space alone stays cheap.
    """

    def __init__(self, *, keeps_leading: bool = True) -> None:
        self._is_started = keeps_leading
        self._is_empty = True
        self._held = ""

    def add(self, text: str) -> str:
        """Returns the text that is certainly not trailing white space."""
        if not self._is_started:
            text = text.lstrip()
            if not text:
                return ""
            self._is_started = True
        body = text.rstrip()
        if body:
            certain, self._held = self._held + body, text[len(body) :]
        else:
            certain, self._held = "", self._held + text
        if len(self._held) > _LONGEST_SPACE:
            certain += self._held[:-_LONGEST_SPACE]
            self._held = self._held[-_LONGEST_SPACE:]
        self._is_empty = self._is_empty and not certain
        return certain

    def flush(self) -> str:
        """Returns the white space held back. For callers that must keep it after all."""
        held, self._held = self._held, ""
        return held

    def interrupt(self) -> None:
        """A tool call interrupts the text. White space that was held back is returned only if there is text
        before and after the call."""
        self._is_started = False
        if self._is_empty:
            self._held = ""


def partial_marker_length(text: str, markers: Iterable[str]) -> int:
    """The length of the longest suffix of `text` that is a prefix of a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
