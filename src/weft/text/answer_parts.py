"""The parts of an answer (content, reasoning and tool calls), and the deltas in which a stream reports them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


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
    written: str = ""
    """The text of the call up to its arguments, as the model wrote it: the white space before the call, the marker, the
    name. If the arguments were held back, their text so far is included."""


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
    written: str = ""
    """The text of the call up to its arguments (`ToolCallStart.written`)."""

    @property
    def text(self) -> str:
        """The call as text, for clients that take only complete calls."""
        return self.written + self.arguments


@dataclass
class AnswerParts:
    """All parts of one answer, in the order of the model. Parts of the same kind that follow each other are one."""

    parts: list[Content | Reasoning | ParsedCall] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[ParsedCall]:
        return [part for part in self.parts if isinstance(part, ParsedCall)]


def join_deltas(deltas: Iterable[Delta]) -> AnswerParts:
    """The parts of an answer, from all its deltas."""
    parts: list[Content | Reasoning | ParsedCall] = []
    texts: list[list[str]] = []
    """The pieces of each part's text or, for a call, of its arguments, which follow the start of the call."""
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            parts.append(ParsedCall(delta.id, delta.name, written=delta.written))
            texts.append([])
        elif isinstance(delta, ToolCallArguments) or (parts and type(parts[-1]) is type(delta)):
            texts[-1].append(delta.text)
        else:
            parts.append(delta)
            texts.append([delta.text])
    for index, text in enumerate(map("".join, texts)):
        part = parts[index]
        if isinstance(part, ParsedCall):
            part.arguments = text
        else:
            parts[index] = replace(part, text=text)
    return AnswerParts(parts)


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
        """Returns the white space held back, for callers that keep it."""
        held, self._held = self._held, ""
        return held

    def interrupt(self) -> str:
        """Prepares for a tool call. The white space held back stays held: `add` returns it if text follows the call.
        Without text before the call it is dropped. Also returns it, for callers that write the call as text."""
        self._is_started = False
        if self._is_empty:
            self._held = ""
        return self._held


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
