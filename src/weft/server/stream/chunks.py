"""Encodes the chunks of one stream. The JSON that all chunks have in common is encoded once, not for every token."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.server.api.openai import ResponseBuilder

_encode = msgspec.json.Encoder().encode


class Chunks:
    """Encodes chunks as server-sent events."""

    def __init__(self, builder: ResponseBuilder, *, include_usage: bool) -> None:
        self._builder = builder
        whole = _encode(builder.chunk([], usage=None) if include_usage else builder.chunk([]))
        split = whole.rindex(b"[]") + 1  # no list comes after the choices
        self._prefix, self._suffix = b"data: " + whole[:split], whole[split:] + b"\n\n"
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By answer: the bytes before and after the text, in a chunk that has only text."""

    def event(self, choice: dict[str, Any]) -> bytes:
        return self._prefix + _encode(choice) + self._suffix

    def text(self, index: int, text: str) -> bytes:
        """The same bytes as `event(builder.text(index, text))`, but much faster."""
        around = self._around_text.get(index)
        if around is None:
            whole = self.event(self._builder.text(index, ""))
            split = whole.rindex(b'""')  # no string comes after the text
            around = self._around_text[index] = whole[:split], whole[split + 2 :]
        return around[0] + _encode(text) + around[1]


def event(content: Any) -> bytes:
    """Encodes an event that is not a chunk of an answer: usage, or an error."""
    return b"data: " + _encode(content) + b"\n\n"
