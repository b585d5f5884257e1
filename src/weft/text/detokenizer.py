"""Token ids of a stream to text, token by token, without ever giving out half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from weft.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_INCOMPLETE = "\ufffd"
_CONTEXT = 8
_MOST_HELD = 16
_MOST_TOKENS = 64
"""What one token may cost, where a decoder has to see the tokens before it."""


class Detokenizer:
    """The text of one stream. Each token costs its own bytes, however long the stream already is.

    Control tokens are no part of it, but for those in `shown`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_control: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.control_ids if skip_control else frozenset()
        if shown:
            self._skipped -= shown
        self._decoder = _Utf8Decoder("replace")
        self._window = None if tokenizer.is_concatenative else _Window(tokenizer)

    def add(self, token_id: int) -> str:
        """The text that is certain once this token is known; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        if self._window is not None:
            return self._window.add([token_id])
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """As `add` for each, at a fraction of the cost."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        if self._window is not None:
            return self._window.add([one for one in token_ids if one not in skipped])
        return self._decoder.decode(b"".join([token_bytes(one) for one in token_ids if one not in skipped]))

    def finish(self) -> str:
        """What is left: a replacement character if the stream ended inside a character."""
        if self._window is not None:
            return self._window.finish()
        return self._decoder.decode(b"", final=True)


class _Window:
    """The last tokens of a stream whose text depends on their neighbours, decoded again with each that comes.

    A decoder may look at a token before or behind, and at the first of all (which gets no space): so some tokens stay in
    the window whose text was given out.

        tokens  [ context ................ | new .... ]
        text    [ given .................. | new | held ]     held: what the next token may still change
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""
        """The beginning of the window's text that was given out."""

    def add(self, token_ids: list[int]) -> str:
        self._ids += token_ids
        certain = self._certain()
        is_full = len(self._ids) > _MOST_TOKENS
        # Where the decoder changed what was given out, nothing more is given until the text begins with that again.
        if not (certain.startswith(self._given) or is_full):
            return ""
        new, self._given = certain[len(self._given) :], max(certain, self._given, key=len)
        if len(self._ids) > 2 * _CONTEXT:
            self._move(is_full)
        return new

    def finish(self) -> str:
        new = self._decode(self._ids)[len(self._given) :]
        self._ids, self._given = [], ""
        return new

    def _certain(self) -> str:
        """The text of the window without what may be part of a character, or of several bytes that are read together."""
        end = len(self._ids)
        while end and len(self._ids) - end <= _MOST_HELD and self._tokenizer.is_byte(self._ids[end - 1]):
            end -= 1
        text = self._decode(self._ids[:end] if len(self._ids) - end <= _MOST_HELD else self._ids)
        certain = text.rstrip(_INCOMPLETE)
        return certain if len(text) - len(certain) <= _MOST_HELD else text[:-1]

    def _move(self, must_move: bool) -> None:
        """Leaves all but the context out of the window, where that changes nothing behind."""
        rest = self._decode(self._ids)[len(self._given) :]
        start = len(self._ids) - _CONTEXT
        while start and self._tokenizer.is_byte(self._ids[start]) and not must_move:
            start -= 1
        text = self._decode(self._ids[start:])
        given = text.removesuffix(rest)
        if (text.endswith(rest) and given.strip()) or must_move:
            self._ids, self._given = self._ids[start:], given

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_control=False)
