"""The input and the answers of one request, collected while the answers are generated, to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec

from weft.server.state.feedback import KeptAnswers
from weft.text.answer_parts import AnswerParts, Delta, join_deltas
from weft.text.conversation import Conversation, template_messages

if TYPE_CHECKING:
    from weft.request import RequestId
    from weft.server.api.answer_format import Prompt
    from weft.server.stream.choices import Piece
    from weft.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_MAX_BYTES = 4 << 20
"""Limit for one request in memory."""
_PROMPT_FACTOR = 8
"""A parsed prompt takes up to this many times the bytes of its JSON."""
_PIECE_BYTES = 128
"""Memory of one part of an answer, without its text."""


class Memory:
    """The bytes of all transcripts that are open or wait to be written."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_lost = 0
        """Requests that were not kept, because there was no memory or no room for them."""
        self._max_bytes = max_bytes

    def may_add(self, num_bytes: int) -> bool:
        """Counts these bytes if they are within the limit. Returns whether they are."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True


@dataclass(frozen=True)
class KeptInput:
    """The request that the answers belong to."""

    request_id: RequestId
    owner: str
    model: str
    prompt: Conversation | Sequence[Prompt]
    prompt_tokens: Sequence[Sequence[int]]
    """The tokens of each prompt, for prompts that are not text."""
    tools: list[dict[str, Any]] | None


class Transcript:
    """Collects the answers to one request. Belongs to the event loop until it is closed. It never fails a request: a
    transcript that grows too large is dropped."""

    def __init__(self, given: KeptInput, size: int, memory: Memory) -> None:
        """`size`: bytes of the body of the request."""
        self._given = given
        self._memory = memory
        self._texts: dict[int, StringIO] = {}
        self._deltas: dict[int, list[Delta]] = {}
        self._num_bytes = 0
        self.is_open = True
        self._grow(_PROMPT_FACTOR * size)

    def add(self, piece: Piece) -> None:
        """Adds new text of an answer."""
        if not self.is_open:
            return
        index = piece.choice.index
        if piece.deltas is None:
            self._texts.setdefault(index, StringIO()).write(piece.text)
        else:
            self._deltas.setdefault(index, []).extend(piece.deltas)
        # A character takes up to four bytes.
        self._grow(4 * len(piece.text) + _PIECE_BYTES * len(piece.deltas or ()))

    def _grow(self, num_bytes: int) -> None:
        """Counts more bytes. Drops the transcript if they exceed a limit."""
        if self._num_bytes + num_bytes > _MAX_BYTES or not self._memory.may_add(num_bytes):
            self._memory.num_lost += 1
            self.drop()
        else:
            self._num_bytes += num_bytes

    def close(self) -> bool:
        """Ends the collection; the memory stays counted. Returns False if the transcript was dropped or closed before."""
        was_open, self.is_open = self.is_open, False
        return was_open

    def drop(self) -> None:
        """Forgets an open transcript. Without effect after `close`."""
        if self.close():
            self.free()

    def free(self) -> None:
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._texts, self._deltas = {}, {}

    def as_row(self, tokenizer: Tokenizer, now: float) -> KeptAnswers:
        """The row to store. Takes time for long texts, so it runs in a thread."""
        given = self._given
        found: dict[int, Any] = {index: text.getvalue() for index, text in self._texts.items()}
        found |= {index: join_deltas(deltas) for index, deltas in self._deltas.items()}
        answers = [found.get(index, "") for index in range(max(found, default=0) + 1)]
        if isinstance(given.prompt, Conversation):
            messages = template_messages(given.prompt.items)
            beginning = ""
            if given.prompt.continues_last and messages and isinstance(messages[-1].get("content"), str):
                beginning = messages.pop()["content"]  # the answer is the rest of this message
            content: dict[str, Any] = {"messages": messages}
            if given.tools:
                content["tools"] = given.tools
            answers = [_message(one, beginning) for one in answers]
        else:
            content = {
                "prompts": [
                    one if isinstance(one, str) else tokenizer.decode(tokens, skip_control=False)
                    for one, tokens in zip(given.prompt, given.prompt_tokens, strict=True)
                ]
            }
        request_id, owner, model = given.request_id, given.owner, given.model
        return KeptAnswers(request_id, owner, now, model, len(answers), _encode(content), _encode(answers))


def _message(answer: str | AnswerParts, beginning: str) -> dict[str, Any]:
    """The answer as the next message of its conversation."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": beginning + answer}
    message: dict[str, Any] = {"role": "assistant", "content": beginning + answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in answer.calls
        ]
    return message
