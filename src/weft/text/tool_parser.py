"""Reads the calls of tools out of an answer while it comes.

One generator describes what may stand in an answer, and rests wherever the text that came so far ends: how it was
cut cannot make a difference. Every character is looked at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator

from weft.text.answer_parts import CallArguments, CallBegins, Content, Delta, Trimmed, overlap
from weft.text.tool_formats import ToolFormat

_LONGEST_HEAD = 1 << 14
"""Characters up to the arguments of a call, which are held back until it is certain that it is one."""
_SPACE = re.compile(r"\s*")
_STRING_END = re.compile(r'["\\]')
_BRACKET_OR_STRING = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[\w.+-]*")
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_ARGUMENTS = ("arguments", "parameters")

Steps = Generator[None, None, None]


class _NotACall(Exception):
    pass


class ToolParser:
    """What was read of one answer. A call is told once its arguments begin; what turns out to be no call is content.

    `names` are the tools there are. An answer that only looks like a call (`ToolFormat.is_bare`) is one only if it
    names one of them; after an opening any name is taken, since the model can be told that it was wrong.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str] = (), *, max_calls: int | None = None
    ) -> None:
        self.is_over = False
        """`max_calls` are complete; what follows is not read."""
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._text = ""
        self._place = 0
        self._is_ended = False
        self._head: list[str] = []
        """What was read since it was last certain what it is."""
        self._head_length = 0
        self._content = Trimmed()
        self._is_after_call = False
        self._num_calls = 0
        self._deltas: list[Delta] = []
        self._steps = self._answer()
        next(self._steps)

    def add(self, text: str) -> list[Delta]:
        self._text = self._text[self._place :] + text
        self._place = 0
        return self._go()

    def finish(self) -> list[Delta]:
        """What is left once no more text follows."""
        self._is_ended = True
        deltas = self._go()
        if not self._is_after_call and (rest := self._content.rest()):
            deltas.append(Content(rest))
        return deltas

    def _go(self) -> list[Delta]:
        if not self.is_over:
            next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    # ------------------------------------------------------------------ what an answer may hold

    def _answer(self) -> Steps:
        yield
        if self._form.is_bare:
            yield from self._attempt(self._bare_calls())
        while not self.is_over:
            opening = yield from self._until_opening()
            if not opening:
                return
            self._keep(opening)
            yield from self._attempt(self._calls(is_marked=True))

    def _attempt(self, calls: Steps) -> Steps:
        """Reads calls; what is none is content again, and reading goes on behind it."""
        try:
            yield from calls
        except _NotACall:
            pass
        self._say("".join(self._settled()))

    def _until_opening(self) -> Generator[None, None, str]:
        while True:
            text, start = self._text, self._place
            found = self._openings.search(text, start)
            if found:
                self._place = found.end()
                self._say(text[start : found.start()])
                return found[0]
            kept = 0 if self._is_ended else overlap(text[start:], self._form.openings)
            self._place = len(text) - kept
            self._say(text[start : self._place])
            if self._is_ended:
                return ""
            yield

    def _bare_calls(self) -> Steps:
        yield from self._space()
        if (yield from self._next()) in ("{", "["):
            yield from self._calls(is_marked=False)

    def _calls(self, is_marked: bool) -> Steps:
        """One call, or several: in a list, or with `,` or `;` or nothing between them."""
        yield from self._space()
        is_list = (yield from self._next()) == "["
        if is_list:
            self._take()
            yield from self._space()
        if (yield from self._next()) == "{":
            yield from self._objects(is_marked)
        elif self._form.has_named_calls and not is_list:
            yield from self._named_call()
        else:
            raise _NotACall
        if is_list and (yield from self._next()) == "]":
            self._take()
            self._settled()
        yield from self._closing()

    def _objects(self, is_marked: bool) -> Steps:
        while True:
            yield from self._object(is_marked)
            if self.is_over:
                return
            yield from self._space()
            if (yield from self._next()) in (",", ";"):
                self._take()
                yield from self._space()
            if (yield from self._next()) != "{":
                return

    def _object(self, is_marked: bool) -> Steps:
        """One call as an object with a name and arguments, in any order, beside whatever else."""
        yield from self._expect("{")
        name, held, is_begun = "", "", False
        while True:
            yield from self._space()
            if (yield from self._next()) == "}":
                break
            key = yield from self._string()
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if key == "name" and not name:
                name = yield from self._string()
                if not name or (not is_marked and name not in self._names):
                    raise _NotACall
            elif key in _ARGUMENTS and not held and not is_begun:
                if name and (yield from self._next()) == "{":
                    self._begin(name)
                    is_begun = True
                    yield from self._value(self._argue)
                else:
                    held = yield from self._held_arguments()
            else:
                yield from self._value(self._keep)
            if held and name and not is_begun:
                self._begin(name)
                self._argue(held)
                is_begun = True
            yield from self._space()
            if (yield from self._next()) != ",":
                break
            self._take()
        yield from self._expect("}")
        if not name:
            raise _NotACall
        if not is_begun:
            self._begin(name)
            self._argue("{}")
        self._end()

    def _named_call(self) -> Steps:
        """A name, perhaps an id, and the arguments: `name[ARGS]{...}`."""
        name = yield from self._run(_NAME)
        if not name:
            raise _NotACall
        yield from self._space()
        if (yield from self._next()) == "[":
            self._take()
            word = yield from self._run(_NAME)
            if word == "CALL_ID":
                yield from self._expect("]")
                yield from self._run(_NAME)
                yield from self._expect("[")
                word = yield from self._run(_NAME)
            if word != "ARGS":
                raise _NotACall
            yield from self._expect("]")
            yield from self._space()
        if (yield from self._next()) != "{":
            raise _NotACall
        self._begin(name)
        yield from self._value(self._argue)
        self._end()

    def _held_arguments(self) -> Generator[None, None, str]:
        """Arguments that cannot be told as they come: the name is yet to come, or they are a string of JSON."""
        pieces: list[str] = []

        def keep(text: str) -> None:
            pieces.append(text)
            self._keep(text)

        yield from self._value(keep)
        text = "".join(pieces)
        if text == "null":
            return "{}"
        if text.startswith('"'):
            text = _decoded(text)
        if not text.startswith("{"):
            raise _NotACall
        return text

    def _closing(self) -> Steps:
        """Some models forget it; then nothing is missing but it."""
        if self.is_over:
            return
        yield from self._space()
        for character in self._form.closing:
            if (yield from self._next()) != character:
                return
            self._take()
        self._settled()

    # ------------------------------------------------------------------ reading

    def _next(self) -> Generator[None, None, str]:
        """The next character, which stays unread; "" at the end."""
        while self._place == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._place]

    def _take(self) -> None:
        self._place += 1
        self._keep(self._text[self._place - 1])

    def _expect(self, character: str) -> Steps:
        if (yield from self._next()) != character:
            raise _NotACall
        self._take()

    def _run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """All characters that the pattern, a repetition of one class, matches."""
        pieces: list[str] = []
        while (yield from self._next()) and (found := pattern.match(self._text, self._place)) and found[0]:
            self._place = found.end()
            pieces.append(found[0])
            self._keep(found[0])
        return "".join(pieces)

    def _space(self) -> Steps:
        yield from self._run(_SPACE)

    def _string(self) -> Generator[None, None, str]:
        if (yield from self._next()) != '"':
            raise _NotACall
        pieces: list[str] = []

        def keep(text: str) -> None:
            pieces.append(text)
            self._keep(text)

        yield from self._value(keep)
        return _decoded("".join(pieces))

    def _value(self, give: Callable[[str], object]) -> Steps:
        """One JSON value, given on piece by piece as it is written."""
        scanner = _ValueScanner()
        while not scanner.is_over:
            if scanner.is_broken or not (yield from self._next()):
                raise _NotACall  # what was told of it stays told
            end = scanner.scan(self._text, self._place)
            piece, self._place = self._text[self._place : end], end
            if piece:
                give(piece)

    # ------------------------------------------------------------------ telling

    def _keep(self, text: str) -> None:
        """Holds back what was just read. What is beyond the limit is unread again: it may hold an opening."""
        room = _LONGEST_HEAD - self._head_length
        self._head.append(text[:room])
        self._head_length += len(text)
        if len(text) > room:
            self._place -= len(text) - room
            raise _NotACall

    def _settled(self) -> list[str]:
        """It is certain what was read: nothing is held back any more."""
        head, self._head, self._head_length = self._head, [], 0
        return head

    def _say(self, text: str) -> None:
        if given := self._content.add(text):
            self._deltas.append(Content(given))
            self._is_after_call = False

    def _begin(self, name: str) -> None:
        self._settled()
        self._content.interrupt()
        self._is_after_call = True
        self._deltas.append(CallBegins(self._num_calls, self._form.new_id(), name))
        self._num_calls += 1

    def _argue(self, text: str) -> None:
        self._deltas.append(CallArguments(self._num_calls - 1, text))

    def _end(self) -> None:
        self._settled()
        self.is_over = self._num_calls == self._max_calls


class _ValueScanner:
    """Finds where a JSON value ends, in text that comes in pieces. It looks at strings and brackets alone."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_broken = False
        """A bracket closes another kind."""
        self._brackets: list[str] = []
        self._is_started = False
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, place: int) -> int:
        """How far the value goes in this piece."""
        if not self._is_started:
            self._is_started = True
            if text[place] not in '"{[':
                return self._scalar(text, place)
        elif not self._brackets and not self._is_in_string:
            return self._scalar(text, place)
        while place < len(text) and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            pattern = _STRING_END if self._is_in_string else _BRACKET_OR_STRING
            found = pattern.search(text, place)
            if found is None:
                return len(text)
            if not self._see(found[0]):
                self.is_broken = True
                return found.start()
            place = found.end()
        return place

    def _see(self, character: str) -> bool:
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

    def _scalar(self, text: str, place: int) -> int:
        """A number, true, false or null: over where something else begins."""
        found = _SCALAR.match(text, place)
        assert found is not None, "it matches nothing too"
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
