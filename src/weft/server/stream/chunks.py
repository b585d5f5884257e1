"""The chunks of one stream as bytes: what all of them have in common is encoded once, not for every token."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.server.api.openai import ResponseBuilder

_encode = msgspec.json.Encoder().encode


class Chunks:
    """Makes events of one stream."""

    def __init__(self, builder: ResponseBuilder, *, include_usage: bool) -> None:
        self._builder = builder
        whole = _encode(builder.chunk([], usage=None) if include_usage else builder.chunk([]))
        split = whole.rindex(b"[]") + 1  # behind the choices there is no other list
        self._prefix, self._suffix = b"data: " + whole[:split], whole[split:] + b"\n\n"
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By answer, of a chunk that is text and no more: what comes before the text and behind it."""

    def event(self, choice: dict[str, Any]) -> bytes:
        return self._prefix + _encode(choice) + self._suffix

    def text(self, index: int, text: str) -> bytes:
        """As `event` with `Shape.text`, at a fraction of the cost."""
        around = self._around_text.get(index)
        if around is None:
            whole = self.event(self._builder.text(index, ""))
            split = whole.rindex(b'""')  # behind the text nothing is a string
            around = self._around_text[index] = whole[:split], whole[split + 2 :]
        return around[0] + _encode(text) + around[1]


def event(content: Any) -> bytes:
    """One that is no chunk of an answer's."""
    return b"data: " + _encode(content) + b"\n\n"
