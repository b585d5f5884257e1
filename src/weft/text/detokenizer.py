"""Incremental detokenising: turns a stream of token ids into text, and never emits an incomplete character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from weft.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_INCOMPLETE = "\ufffd"
# Limits of `_Window`, for tokenizers that decode a token together with its neighbours.
_CONTEXT = 8  # tokens kept before the new ones
_MOST_HELD = 16  # byte tokens, or replacement characters, held back at the end
_MOST_TOKENS = 64  # tokens in the window, which bounds the cost of one token


class Detokenizer:
    """Detokenises one stream. The cost of a token does not depend on the length of the stream.

    Control tokens are left out, except those in `visible_control_ids`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_control: bool = True,
        visible_control_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.control_ids if skip_control else frozenset()
        if visible_control_ids:
            self._skipped -= visible_control_ids
        self._decoder = _Utf8Decoder("replace")
        self._window = None if tokenizer.is_concatenative else _Window(tokenizer)

    def add(self, token_id: int) -> str:
        """Returns the new text; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        if self._window is not None:
            return self._window.add([token_id])
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """Like `add` for each token, but much cheaper."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        if self._window is not None:
            return self._window.add([one for one in token_ids if one not in skipped])
        return self._decoder.decode(b"".join([token_bytes(one) for one in token_ids if one not in skipped]))

    def finish(self) -> str:
        """Ends the stream. Returns a replacement character if the last character is incomplete."""
        if self._window is not None:
            return self._window.finish()
        return self._decoder.decode(b"", final=True)


class _Window:
    """The last tokens of a stream, decoded again with each new token, since their text depends on their neighbours.

    A decoder may look at the previous or next token, and treats the first token differently (it gets no space). So
    some tokens stay in the window after their text was emitted.

        tokens  [ context ................ | new .... ]
        text    [ emitted ................ | new | held ]     held: text that the next token may still change
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = ""
        """The start of the window's text, which was emitted already."""

    def add(self, token_ids: list[int]) -> str:
        self._ids += token_ids
        certain = self._certain()
        is_full = len(self._ids) > _MOST_TOKENS
        # If the decoder changed emitted text, emit nothing until the text starts with the emitted text again.
        if not (certain.startswith(self._emitted) or is_full):
            return ""
        new, self._emitted = certain[len(self._emitted) :], max(certain, self._emitted, key=len)
        if len(self._ids) > 2 * _CONTEXT:
            self._shrink(is_full)
        return new

    def finish(self) -> str:
        new = self._decode(self._ids)[len(self._emitted) :]
        self._ids, self._emitted = [], ""
        return new

    def _certain(self) -> str:
        """The text of the window without trailing byte tokens and incomplete characters."""
        end = len(self._ids)
        while end and len(self._ids) - end <= _MOST_HELD and self._tokenizer.is_byte(self._ids[end - 1]):
            end -= 1
        text = self._decode(self._ids[:end] if len(self._ids) - end <= _MOST_HELD else self._ids)
        certain = text.rstrip(_INCOMPLETE)
        return certain if len(text) - len(certain) <= _MOST_HELD else text[:-1]

    def _shrink(self, must_shrink: bool) -> None:
        """Drops the tokens before the context, if `must_shrink` or if that does not change the text not emitted yet."""
        rest = self._decode(self._ids)[len(self._emitted) :]
        start = len(self._ids) - _CONTEXT
        while start and self._tokenizer.is_byte(self._ids[start]) and not must_shrink:
            start -= 1
        text = self._decode(self._ids[start:])
        emitted = text.removesuffix(rest)
        if (text.endswith(rest) and emitted.strip()) or must_shrink:
            self._ids, self._emitted = self._ids[start:], emitted

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_control=False)
