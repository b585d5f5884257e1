"""Parses tool calls in a streamed answer.

The parser is a generator over the whole answer, which yields when it needs more text. So the result does not depend on
where the stream splits the text. Every character is read once, except those beyond the limit of `_hold`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator

from weft.text.answer_parts import (
    Content,
    Delta,
    StreamTrimmer,
    ToolCallArguments,
    ToolCallStart,
    partial_marker_length,
)
from weft.text.tool_formats import ToolFormat

_LONGEST_HELD = 1 << 14
"""At most this many characters are held back. A call is held back up to its arguments, because its text may turn out to
be content."""
_SPACE = re.compile(r"\s*")
_STRING_END = re.compile(r'["\\]')
_BRACKET_OR_STRING = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[\w.+-]*", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_ARGUMENTS = ("arguments", "parameters")

Parser = Generator[None, None, None]


class _NotACall(Exception):
    pass


class ToolParser:
    """Parses one answer. A call is reported when its arguments start. Text that turns out to be no call is content.

    `names` are the available tools. A call without an opening marker (`ToolFormat.has_unmarked_calls`) must name one of
    them. After a marker any name is accepted: the client can report the unknown tool to the model.
    """

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str] = (), *, max_calls: int | None = None
    ) -> None:
        self.is_over = False
        """Whether `max_calls` calls are complete. Then further text is ignored."""
        self._format = tool_format
        self._names = names
        self._max_calls = max_calls
        self._openings = re.compile("|".join(map(re.escape, tool_format.openings)))
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._held: list[str] = []
        """Text that was read, and may still turn out to be content."""
        self._held_length = 0
        self._content = StreamTrimmer()
        self._is_after_call = False
        self._num_calls = 0
        self._deltas: list[Delta] = []
        self._parser = self._answer()
        next(self._parser)

    def add(self, text: str) -> list[Delta]:
        self._text = self._text[self._position :] + text
        self._position = 0
        return self._advance()

    def finish(self) -> list[Delta]:
        """Ends the text and returns the remaining deltas."""
        self._is_ended = True
        deltas = self._advance()
        if not self._is_after_call and (rest := self._content.flush()):
            deltas.append(Content(rest))
        return deltas

    def _advance(self) -> list[Delta]:
        """Lets the parser read the new text. Returns the deltas that it has made."""
        if not self.is_over:
            next(self._parser, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    # ------------------------------------------------------------------ the syntax of an answer

    def _answer(self) -> Parser:
        """Parses the whole answer: content and calls alternate."""
        yield
        if self._format.has_unmarked_calls:
            yield from self._attempt(self._unmarked_calls())
        while not self.is_over:
            opening = yield from self._until_opening()
            if not opening:
                return
            self._hold(opening)
            yield from self._attempt(self._calls(has_marker=True))

    def _attempt(self, calls: Parser) -> Parser:
        """Parses calls. On a syntax error, the text held back becomes content, and parsing continues after it."""
        try:
            yield from calls
        except _NotACall:
            pass
        self._emit_content("".join(self._release()))

    def _until_opening(self) -> Generator[None, None, str]:
        """Emits content up to the next opening marker. Returns the marker; "" at the end of the text."""
        while True:
            text, start = self._text, self._position
            found = self._openings.search(text, start)
            if found:
                self._position = found.end()
                self._emit_content(text[start : found.start()])
                return found[0]
            held = 0 if self._is_ended else partial_marker_length(text[start:], self._format.openings)
            self._position = len(text) - held
            self._emit_content(text[start : self._position])
            if self._is_ended:
                return ""
            yield

    def _unmarked_calls(self) -> Parser:
        yield from self._skip_space()
        if (yield from self._peek()) in ("{", "["):
            yield from self._calls(has_marker=False)

    def _calls(self, has_marker: bool) -> Parser:
        """One or several calls: in a list, or separated by `,`, `;` or nothing."""
        yield from self._skip_space()
        is_list = (yield from self._peek()) == "["
        if is_list:
            self._consume()
            yield from self._skip_space()
        if (yield from self._peek()) == "{":
            yield from self._objects(has_marker)
        elif self._format.has_named_calls and not is_list:
            yield from self._named_call()
        else:
            raise _NotACall
        if is_list and (yield from self._peek()) == "]":
            self._consume()
            self._release()
        yield from self._closing_marker()

    def _objects(self, has_marker: bool) -> Parser:
        while True:
            yield from self._object(has_marker)
            if self.is_over:
                return
            yield from self._skip_space()
            if (yield from self._peek()) in (",", ";"):
                self._consume()
                yield from self._skip_space()
            if (yield from self._peek()) != "{":
                return

    def _object(self, has_marker: bool) -> Parser:
        """A call as a JSON object with a name and arguments, in any order. Other keys are ignored."""
        yield from self._expect("{")
        name, held, is_started = "", "", False
        while True:
            yield from self._skip_space()
            if (yield from self._peek()) == "}":
                break
            key = yield from self._string()
            yield from self._skip_space()
            yield from self._expect(":")
            yield from self._skip_space()
            if key == "name" and not name:
                name = yield from self._string()
                if not name or (not has_marker and name not in self._names):
                    raise _NotACall
            elif key in _ARGUMENTS and not held and not is_started:
                if name and (yield from self._peek()) == "{":
                    self._start_call(name)
                    is_started = True
                    yield from self._value(self._emit_arguments)
                else:
                    held = yield from self._held_arguments()
            elif key == "name" or key in _ARGUMENTS:
                raise _NotACall  # a second value: it is unknown which one is meant, and no text may be lost
            else:
                yield from self._value(self._hold)
            if held and name and not is_started:
                self._start_call(name)
                self._emit_arguments(held)
                is_started = True
            yield from self._skip_space()
            if (yield from self._peek()) != ",":
                break
            self._consume()
        yield from self._expect("}")
        if not name:
            raise _NotACall
        if not is_started:
            self._start_call(name)
            self._emit_arguments("{}")
        self._end_call()

    def _named_call(self) -> Parser:
        """A call as `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`."""
        name = yield from self._match(_NAME)
        if not name:
            raise _NotACall
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            self._consume()
            word = yield from self._match(_NAME)
            if word == "CALL_ID":
                yield from self._expect("]")
                yield from self._match(_NAME)
                yield from self._expect("[")
                word = yield from self._match(_NAME)
            if word != "ARGS":
                raise _NotACall
            yield from self._expect("]")
            yield from self._skip_space()
        if (yield from self._peek()) != "{":
            raise _NotACall
        self._start_call(name)
        yield from self._value(self._emit_arguments)
        self._end_call()

    def _held_arguments(self) -> Generator[None, None, str]:
        """Arguments that cannot be streamed: the name comes later, or they are a string of JSON."""
        pieces: list[str] = []

        def hold(text: str) -> None:
            pieces.append(text)
            self._hold(text)

        yield from self._value(hold)
        text = "".join(pieces)
        if text == "null":
            return "{}"
        if text.startswith('"'):
            text = _decoded(text)
        if not text.startswith("{"):
            raise _NotACall
        return text

    def _closing_marker(self) -> Parser:
        """The closing marker, which some models omit."""
        if self.is_over:
            return
        yield from self._skip_space()
        for character in self._format.closing:
            if (yield from self._peek()) != character:
                return
            self._consume()
        self._release()

    # ------------------------------------------------------------------ reading

    def _peek(self) -> Generator[None, None, str]:
        """The next character, without consuming it; "" at the end."""
        while self._position == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._position]

    def _consume(self) -> None:
        self._position += 1
        self._hold(self._text[self._position - 1])

    def _expect(self, character: str) -> Parser:
        if (yield from self._peek()) != character:
            raise _NotACall
        self._consume()

    def _match(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Consumes all characters that match the pattern, which is a repetition of one character class."""
        pieces: list[str] = []
        while (yield from self._peek()) and (found := pattern.match(self._text, self._position)) and found[0]:
            self._position = found.end()
            pieces.append(found[0])
            self._hold(found[0])
        return "".join(pieces)

    def _skip_space(self) -> Parser:
        yield from self._match(_SPACE)

    def _string(self) -> Generator[None, None, str]:
        if (yield from self._peek()) != '"':
            raise _NotACall
        pieces: list[str] = []

        def hold(text: str) -> None:
            pieces.append(text)
            self._hold(text)

        yield from self._value(hold)
        return _decoded("".join(pieces))

    def _value(self, emit: Callable[[str], object]) -> Parser:
        """Consumes one JSON value, and passes its text to `emit` as it arrives."""
        scanner = _ValueScanner()
        while not scanner.is_over:
            if scanner.is_broken or not (yield from self._peek()):
                raise _NotACall  # deltas that were reported already cannot be taken back
            end = scanner.scan(self._text, self._position)
            piece, self._position = self._text[self._position : end], end
            if piece:
                emit(piece)

    # ------------------------------------------------------------------ held text and deltas

    def _hold(self, text: str) -> None:
        """Holds back text that was just read. Text beyond the limit is read again: it may contain an opening marker."""
        remaining = _LONGEST_HELD - self._held_length
        self._held.append(text[:remaining])
        self._held_length += len(text)
        if len(text) > remaining:
            self._position -= len(text) - remaining
            raise _NotACall

    def _release(self) -> list[str]:
        """Returns the text held back, and holds nothing any more."""
        held, self._held, self._held_length = self._held, [], 0
        return held

    def _emit_content(self, text: str) -> None:
        if content := self._content.add(text):
            self._deltas.append(Content(content))
            self._is_after_call = False

    def _start_call(self, name: str) -> None:
        written = self._content.interrupt() + "".join(self._release())
        self._is_after_call = True
        self._deltas.append(ToolCallStart(self._num_calls, self._format.new_id(), name, written))
        self._num_calls += 1

    def _emit_arguments(self, text: str) -> None:
        self._deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        self._release()
        self.is_over = self._num_calls == self._max_calls


class _ValueScanner:
    """Finds the end of a JSON value in streamed text. It only tracks strings and brackets."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_broken = False
        """Whether a closing bracket does not match the opening one."""
        self._brackets: list[str] = []
        self._is_started = False
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, position: int) -> int:
        """The end of the value in this text, or the end of the text."""
        if not self._is_started:
            self._is_started = True
            if text[position] not in '"{[':
                return self._scalar(text, position)
        elif not self._brackets and not self._is_in_string:
            return self._scalar(text, position)
        while position < len(text) and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            pattern = _STRING_END if self._is_in_string else _BRACKET_OR_STRING
            found = pattern.search(text, position)
            if found is None:
                return len(text)
            if not self._track(found[0]):
                self.is_broken = True
                return found.start()
            position = found.end()
        return position

    def _track(self, character: str) -> bool:
        """Follows a quote, a backslash or a bracket. Returns False if a closing bracket does not match the opening one."""
        if self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = self._is_escaped
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._brackets.append("}" if character == "{" else "]")
        elif self._brackets.pop() != character:
            return False
        self.is_over = not self._is_in_string and not self._brackets
        return True

    def _scalar(self, text: str, position: int) -> int:
        """A number, true, false or null. It ends before the first character of another kind."""
        found = _SCALAR.match(text, position)
        assert found is not None, "the pattern also matches an empty string"
        self.is_over = found.end() < len(text)
        return found.end()


def _decoded(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        raise _NotACall from None
    if not isinstance(value, str):
        raise _NotACall
    return value
