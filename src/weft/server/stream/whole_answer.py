"""The response of a request that is not streamed: encodes each piece as JSON when it arrives, and sends the body in
parts.

Logprobs as objects take twenty times the memory of their JSON, and encoding them all at the end would block the event
loop for seconds. For the same reason the parts of the body are never joined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.request import GenerationResult, InferenceRequest
from weft.server.api.openai import ResponseBuilder, TokenOffsets
from weft.server.http.byte_budget import RequestBytes
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.loop_turns import LoopTurns
from weft.text.answer_parts import Delta, join_deltas

_encode = msgspec.json.Encoder().encode
_NO_LOGPROBS = b'"logprobs":null'
_PART_BYTES = 64 << 10
"""Bytes that are sent or encoded before the event loop runs other work."""
_CHOICE_BYTES = 512
"""Encoding an answer with an empty text takes as long as encoding this many bytes of text."""
_DELTA_BYTES = 128
"""Memory of a part of an answer, without its text."""
_SMALLEST_ENTRY = {"chat": 50, "completion": 16}
"""Lower bound for the JSON of one token with its logprob. Each token of an answer has 1 + `logprobs` of them."""


def min_response_bytes(
    requests: Sequence[InferenceRequest], builder: ResponseBuilder, max_length: int
) -> int:
    """A lower bound for the bytes of the response, if each answer has `max_tokens` tokens in a context of `max_length`.
    Answers without max_tokens count as empty, since most are short."""
    entry, size = _SMALLEST_ENTRY[builder.api_format], 0
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
        """Returns the number of bytes added."""
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

    def __init__(self, offsets: TokenOffsets) -> None:
        self.text: list[str] = []
        self.deltas: list[Delta] = []
        self.logprobs = _Logprobs()
        self.offsets = offsets


class WholeAnswer:
    """Collects the answers of one request into the body of its response. `answer_bytes` counts its bytes against the
    budget for answers."""

    def __init__(self, builder: ResponseBuilder, answer_bytes: RequestBytes) -> None:
        self._builder = builder
        self._answer_bytes = answer_bytes
        self._partial_answers: dict[int, _PartialAnswer] = {}
        self._starts: Sequence[int] = ()
        """For each prompt that is echoed: its length in text, where its answers begin."""
        self._body: deque[bytes | bytearray] = deque()

    async def collect(self, choices: Choices, loop_turns: LoopTurns) -> list[GenerationResult]:
        """Waits until the answers have ended and their JSON is complete."""
        if self._builder.wants_logprobs:
            self._starts = [
                await self._prompt_text_length(echo.tokens, loop_turns) for echo in self._builder.echoes
            ]
        while not choices.is_over:
            await choices.wait()
            await loop_turns.wait()
            self.add(choices.take())
            if choices.has_more:
                await asyncio.sleep(0)  # continue in the next iteration of the event loop
        await self.write(choices, loop_turns)
        return choices.results

    def response(self, headers: dict[str, str]) -> Response:
        return _PartsResponse(self._body, self._answer_bytes, headers)

    async def _prompt_text_length(self, tokens: Sequence[int], loop_turns: LoopTurns) -> int:
        """The length of the prompt's text, token by token."""
        offsets = TokenOffsets(self._builder.tokenizer)
        for start in range(0, len(tokens), 512):
            await loop_turns.wait()
            for token in tokens[start : start + 512]:
                offsets.add(token)
        return offsets.offset

    def add(self, pieces: Iterable[Piece]) -> None:
        """Encodes new pieces. Raises if the answers become too large."""
        builder, num_bytes = self._builder, 0
        for piece in pieces:
            index = piece.choice.index
            partial = self._partial_answers.get(index)
            if partial is None:
                start = self._starts[index // builder.num_choices_per_prompt] if self._starts else 0
                partial = self._partial_answers[index] = _PartialAnswer(
                    TokenOffsets(builder.tokenizer, start)
                )
                if builder.wants_logprobs:
                    partial.logprobs.add(builder.logprobs((), (), partial.offsets))  # empty lists
            if piece.deltas is not None:
                partial.deltas += piece.deltas
                num_bytes += _DELTA_BYTES * len(piece.deltas)
            elif piece.text:
                partial.text.append(piece.text)
            num_bytes += len(piece.text)
            if builder.wants_logprobs and piece.tokens:
                num_bytes += partial.logprobs.add(
                    builder.logprobs(piece.tokens, piece.logprobs, partial.offsets)
                )
        self._answer_bytes.add(num_bytes)

    async def write(self, choices: Choices, loop_turns: LoopTurns) -> None:
        """Encodes the texts, answer by answer, and frees the memory of each."""
        builder, body = self._builder, self._body
        whole = _encode(builder.response([], choices))
        split = whole.rindex(b"[]") + 1  # no list comes after the choices
        body.append(whole[:split])
        prompt, num_bytes = _Logprobs(), 0
        for index, result in enumerate(choices.results):
            if index % builder.num_choices_per_prompt == 0:
                prompt = await self._prompt_logprobs(index, choices, loop_turns)
            partial = self._partial_answers.pop(index)
            answer = join_deltas(partial.deltas) if builder.has_parts else "".join(partial.text)
            choice = _encode(builder.choice(index, result, answer))
            body.append(b"," + choice if index else choice)
            if builder.wants_logprobs:
                # In a text the quotes of _NO_LOGPROBS would be escaped.
                before, after = body.pop().rsplit(_NO_LOGPROBS, 1)
                body += (before + b'"logprobs":', *partial.logprobs.encoded_after(prompt), after)
            num_bytes += _CHOICE_BYTES + len(choice)
            if num_bytes > _PART_BYTES:
                await loop_turns.wait()
                num_bytes = 0
        body.append(whole[split:])

    async def _prompt_logprobs(self, index: int, choices: Choices, loop_turns: LoopTurns) -> _Logprobs:
        """The logprobs of the prompt. They arrive with its first answer, and are repeated in each of its answers."""
        logprobs, offsets, start = _Logprobs(), TokenOffsets(self._builder.tokenizer), 0
        for scored in choices.prompt_logprobs(index):
            await loop_turns.wait()
            tokens = self._builder.echo(index).tokens[start : start + len(scored)]
            self._answer_bytes.add(logprobs.add(self._builder.logprobs(tokens, scored, offsets)))
            await asyncio.sleep(0)
            start += len(scored)
        return logprobs


class _PartsResponse(Response):
    """Sends a body that is a queue of pieces, and frees each piece after it is sent."""

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
