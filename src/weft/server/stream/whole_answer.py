"""The response of a request that is not streamed: encodes each piece as JSON when it arrives, and sends the body in
parts.

Logprobs as Python objects take twenty times the memory of their JSON. Encoding them all at the end would block the
event loop for seconds; so would joining the parts of a large body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.request import GenerationResult, InferenceRequest
from weft.server.api.answer_format import AnswerWriter
from weft.server.http.byte_budget import RequestBytes
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.loop_turns import LoopTurns
from weft.text.answer_parts import Delta, join_deltas

_encode = msgspec.json.Encoder().encode
_PART_BYTES = 64 << 10
"""Bytes to send or encode at a time. Then the event loop runs other work."""
_CHOICE_BYTES = 512
"""Encoding an answer with an empty text takes as long as encoding this many bytes of text."""
_DELTA_BYTES = 128
"""Memory of one part of an answer (thought, content, tool call), without its text."""


def min_response_bytes(requests: Sequence[InferenceRequest], writer: AnswerWriter, max_length: int) -> int:
    """A lower bound for the bytes of the response, if each answer has `max_tokens` tokens in a context of `max_length`.
    Answers without max_tokens count as empty, since most are short."""
    entry, size = writer.smallest_entry, 0
    for request in requests:
        params = request.params
        per_token = 1 if params.logprobs is None else 1 + (1 + params.logprobs) * entry
        size += params.n * min(params.max_tokens or 0, max_length - len(request.prompt)) * per_token
        if params.prompt_logprobs is not None:
            size += len(request.prompt) * (1 + params.prompt_logprobs) * entry
    return size


class _Logprobs:
    """The logprobs of some tokens as JSON: for each list of the logprobs object, the bytes between its brackets."""

    def __init__(self) -> None:
        self._lists: dict[str, bytearray] = {}

    def add(self, lists: dict[str, list[Any]]) -> int:
        """Encodes and adds entries. Returns the number of bytes added."""
        num_bytes = 0
        for name, values in lists.items():
            encoded = _encode(values)
            known = self._lists.setdefault(name, bytearray())
            if known:
                known += b","
            known += memoryview(encoded)[1:-1]
            num_bytes += len(encoded) - 1
        return num_bytes

    def encoded_after(self, prompt: _Logprobs) -> Iterator[bytes | bytearray]:
        """The complete logprobs object, with the logprobs of the prompt first."""
        lists = {
            name: [some for some in (prompt._lists.get(name), known) if some]
            for name, known in self._lists.items()
        }
        opening = b"{"
        for name, found in lists.items():
            yield opening + _encode(name) + b":["
            yield from (found[0], b",", found[1]) if len(found) == 2 else found
            opening = b"],"
        yield b"]}"


class _PartialAnswer:
    """One answer as far as it has arrived."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.deltas: list[Delta] = []
        self.logprobs = _Logprobs()


class WholeAnswer:
    """Collects the answers of one request into the body of its response. `answer_bytes` counts its bytes against the
    budget for answers."""

    def __init__(self, writer: AnswerWriter, answer_bytes: RequestBytes) -> None:
        self._writer = writer
        self._answer_bytes = answer_bytes
        self._partial_answers: dict[int, _PartialAnswer] = {}
        self._body: deque[bytes | bytearray] = deque()

    async def collect(
        self, choices: Choices, loop_turns: LoopTurns, finish: Callable[[Choices], Awaitable[None]]
    ) -> list[GenerationResult]:
        """Waits until the answers have ended and their JSON is complete. `finish` is awaited after the last piece."""
        await self._writer.before_answers(loop_turns)
        while not choices.is_over:
            await choices.wait()
            await loop_turns.wait()
            self.add(choices.take())
            if choices.has_more:
                await asyncio.sleep(0)  # continue in the next iteration of the event loop
        await finish(choices)
        await self.write(choices, loop_turns)
        return choices.results

    def response(self, headers: dict[str, str]) -> Response:
        return PartsResponse(self._body, self._answer_bytes, headers)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Encodes new pieces. Raises if the answers become too large."""
        writer = self._writer
        # Some writers keep the pieces themselves.
        num_bytes = writer.collect(pieces)
        if num_bytes is not None:
            self._answer_bytes.add(num_bytes)
            return
        num_bytes = 0
        wants_logprobs = writer.context.wants_logprobs
        for piece in pieces:
            index = piece.choice.index
            partial = self._partial_answers.get(index)
            if partial is None:
                partial = self._partial_answers[index] = _PartialAnswer()
                if wants_logprobs:
                    partial.logprobs.add(writer.logprobs(index, (), ()))  # empty lists
            if piece.deltas is not None:
                partial.deltas += piece.deltas
                num_bytes += _DELTA_BYTES * len(piece.deltas)
            elif piece.text:
                partial.text.append(piece.text)
            num_bytes += len(piece.text) + writer.keep(piece)
            if wants_logprobs and piece.tokens:
                num_bytes += partial.logprobs.add(writer.logprobs(index, piece.tokens, piece.logprobs))
        self._answer_bytes.add(num_bytes)

    async def write(self, choices: Choices, loop_turns: LoopTurns) -> None:
        """Encodes the texts, answer by answer, and frees the memory of each."""
        writer, context, body = self._writer, self._writer.context, self._body
        opening, ending = writer.envelope(choices)
        body.append(opening)
        prompt, num_bytes = _Logprobs(), 0
        for index, result in enumerate(choices.results):
            if index % context.num_choices_per_prompt == 0:
                prompt = await self._prompt_logprobs(index, choices, loop_turns)
            partial = self._partial_answers.pop(index, None) or _PartialAnswer()
            answer = join_deltas(partial.deltas) if context.has_parts else "".join(partial.text)
            before, after = writer.answer(index, result, answer)
            body.append(b"," + before if index else before)
            if context.wants_logprobs:
                body += partial.logprobs.encoded_after(prompt)
            body.append(after)
            num_bytes += _CHOICE_BYTES + len(before) + len(after)
            if num_bytes > _PART_BYTES:
                await loop_turns.wait()
                num_bytes = 0
        body.append(ending)

    async def _prompt_logprobs(self, index: int, choices: Choices, loop_turns: LoopTurns) -> _Logprobs:
        """The logprobs of the prompt. They arrive with its first answer, and are repeated in each of its answers."""
        logprobs, start = _Logprobs(), 0
        for scored in choices.prompt_logprobs(index):
            await loop_turns.wait()
            self._answer_bytes.add(logprobs.add(self._writer.prompt_logprobs(index, start, scored)))
            await asyncio.sleep(0)
            start += len(scored)
        return logprobs


class PartsResponse(Response):
    """Sends a body that is a queue of pieces, and frees each piece after it is sent. `answer_bytes` counts the bytes that
    are not sent yet."""

    def __init__(
        self, body: deque[bytes | bytearray], answer_bytes: RequestBytes, headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, headers, media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, body)))
        self._body = body
        self._answer_bytes = answer_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        part = bytearray()
        while self._body:
            piece = memoryview(self._body.popleft())
            for start in range(0, len(piece), _PART_BYTES):
                part += piece[start : start + _PART_BYTES]
                if len(part) >= _PART_BYTES:
                    await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                    self._answer_bytes.add(-min(len(part), self._answer_bytes.num_bytes))
                    part.clear()
                    await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": bytes(part), "more_body": False})
