"""Token ids of a stream to text, token by token, without ever giving out half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from weft.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


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

    def add(self, token_id: int) -> str:
        """The text that is certain once this token is known; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """As `add` for each, at a fraction of the cost."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decoder.decode(b"".join([token_bytes(one) for one in token_ids if one not in skipped]))

    def finish(self) -> str:
        """What is left: a replacement character if the stream ended inside a character."""
        return self._decoder.decode(b"", final=True)
