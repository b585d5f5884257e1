"""Tokenises prompts and detokenises tokens without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from weft.errors import InvalidRequestError, PromptTooLongError
from weft.server.errors import ApiError
from weft.server.text_work.text_process import (
    Chat,
    Ids,
    Part,
    Text,
    TextJob,
    TextResult,
    Tokens,
    TooLong,
    convert,
)
from weft.server.text_work.work_slots import WorkSlots
from weft.server.text_work.worker import Workers, encode_message
from weft.text.model_text import ModelText

_TINY_BYTES = 1 << 10
"""A text of up to this size is tokenised in less time than waking a thread takes."""
_SHORT_BYTES = 8 << 10
"""A prompt of up to this size takes about 10 ms, and is tokenised in a thread rather than in a worker process."""
_GROUP_BYTES = 64 << 10
"""Several prompts go to a worker process in groups of about this size, so that other requests can run in between."""
_BYTES_PER_PROMPT = 32
"""Fixed cost of a prompt, as a number of bytes to tokenise. Detokenising a token costs as much as one byte."""
_SECONDS_PER_BYTE = 5e-7
_THREADS = 4
_PROCESSES = 2
_SECONDS = 120.0
"""Timeout for one group. The longest accepted text takes 20 s."""
_MAX_NORMALISER_SHRINK = 4
"""A normaliser composes characters, which can shorten a text to a third. Only a text that is this many times too long
is certain not to fit. It is refused without tokenising."""

T = TypeVar("T")


class PromptEncoder:
    """Owns the threads for short prompts and the worker processes for long ones. The processes start with the first
    long prompt."""

    def __init__(
        self, text: ModelText, path: str, max_context: int, chat_template: str | None = None
    ) -> None:
        self._text = text
        self.max_context = max_context
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-text")
        self._slots = WorkSlots(_THREADS)
        arguments = (path, chat_template or "", text.tool_format_name or "")
        self._workers = Workers("weft.server.text_work.text_process", *arguments, count=_PROCESSES)
        self._decoder = msgspec.msgpack.Decoder(list[TextResult])

    async def encode(self, prompt: Chat | Text, size: int, client_id: str) -> list[int]:
        """The tokens of a prompt of about `size` bytes."""
        [tokens] = await self._convert([prompt], size, client_id)
        return tokens

    async def encode_texts(
        self, texts: Sequence[str], client_id: str, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The tokens of each text."""
        found: list[list[int]] = []
        for group, size in _groups(texts):
            found += await self._convert([Text(text, add_special_tokens) for text in group], size, client_id)
        return found

    async def decode(self, prompts: Sequence[list[int]], client_id: str) -> list[str]:
        """The text of each list of tokens, with control tokens."""
        found: list[str] = []
        for group, size in _groups(prompts):
            found += await self._convert([Ids(ids) for ids in group], size, client_id)
        return found

    async def run_in_thread(self, size: int, client_id: str, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work` in a thread. The work costs about as much as tokenising `size` bytes."""
        cost = _SECONDS_PER_BYTE * size
        await self._slots.take(client_id, cost)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        finally:
            self._slots.free(cost)

    def check_tokens(self, tokens: list[int]) -> list[int]:
        """Refuses a prompt of token ids that is too long, before each id is checked."""
        if len(tokens) >= self.max_context:
            raise self._too_long(len(tokens), "prompt")
        return tokens

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._workers.close()

    async def _convert(self, parts: Sequence[Part], size: int, client_id: str) -> list[Any]:
        """Converts prompts to tokens and `Ids` to text. The size decides where: in the event loop, in a thread, or in a
        worker process."""
        if size <= _TINY_BYTES and not any(isinstance(part, Chat) for part in parts):
            return [convert(self._text, part) for part in parts]
        if size <= _SHORT_BYTES:
            return await self.run_in_thread(
                size, client_id, lambda: [convert(self._text, part) for part in parts]
            )
        await self.run_in_thread(_SHORT_BYTES, client_id, self._check_lengths, parts)
        job = encode_message(TextJob(list(parts), self.max_context), parts[0])
        try:
            result = await self._workers.run(
                job, client_id=client_id, cost=_SECONDS_PER_BYTE * size, seconds=_SECONDS
            )
        except TimeoutError:
            message = (
                f"tokenising took more than {_SECONDS:g} s; send the request again later, or a shorter text"
            )
            raise ApiError(503, message, code="server_busy") from None
        return [self._value(part, one) for part, one in zip(parts, self._decoder.decode(result), strict=True)]

    def _value(self, part: Part, result: TextResult) -> list[int] | str:
        if isinstance(result, Tokens):
            return result.ids
        if isinstance(result, Text):
            return result.text
        if isinstance(result, TooLong):
            raise self._too_long(result.count, _field(part))
        raise InvalidRequestError(result.message, field=result.field, code=result.code)

    def _check_lengths(self, parts: Sequence[Part]) -> None:
        """Refuses texts that cannot fit the context. A text has at least as many tokens as its length divided by the
        length of the longest token."""
        longest = self._text.tokenizer.longest_token  # computed at the first call
        for part in parts:
            num_characters = 0
            if isinstance(part, Text):
                num_characters = len(part.text)
            elif isinstance(part, Chat):
                contents = (message.get("content") for message in part.messages)
                num_characters = sum(len(content) for content in contents if isinstance(content, str))
            at_least = num_characters // longest
            if at_least > _MAX_NORMALISER_SHRINK * self.max_context:
                raise self._too_long(at_least // _MAX_NORMALISER_SHRINK, _field(part), "at least ")

    def _too_long(self, num_tokens: int, field: str, bound: str = "") -> PromptTooLongError:
        most = self.max_context - 1
        return PromptTooLongError(
            f"the prompt has {bound}{num_tokens} tokens; allowed: at most {most}, so that one new token fits; "
            # Clients recognise this error by the words "maximum context length is", as in the OpenAI API.
            f"this model's maximum context length is {self.max_context} tokens here; shorten it",
            field,
            num_tokens,
            most,
        )


S = TypeVar("S", str, list[int])


def _groups(prompts: Sequence[S]) -> Iterator[tuple[Sequence[S], int]]:
    """Splits prompts into groups. Yields each group with its approximate size in bytes."""
    first, size = 0, 0
    for index, prompt in enumerate(prompts):
        more = len(prompt) + _BYTES_PER_PROMPT
        if index > first and size + more > _GROUP_BYTES:
            yield prompts[first:index], size
            first, size = index, 0
        size += more
    if prompts:
        yield prompts[first:], size


def _field(part: Part) -> str:
    return "messages" if isinstance(part, Chat) else "prompt"
